#!/usr/bin/env bash
# One Ray node in a container, or a job beside one.
#
#   node.sh head                 the Ray head, which holds no fleet
#   node.sh trainer|inference    a node of that role; NUM_GPUS and NUM_CPUS say what Ray may place there
#   node.sh head-trainer         both in one, where each node has a host of its own
#   node.sh kuberay              a node of KubeRay's, which gives the `ray start` line in a variable
#   node.sh check                the doctor's groups CHECK_GROUPS for CHECK_CONFIG, before a node starts
#   node.sh health               is this node's Ray alive and known to the head?
#   node.sh COMMAND ...          any other command, such as rdt-e2e sync
#
# RAY_HEAD is the head's host:port. What Ray, UCX and NIXL read must be in the environment already.
set -euo pipefail

head=${RAY_HEAD:-head:6379}
agent_port=52365
wait_s=${HEAD_WAIT_S:-300}

say() { printf 'node: %s\n' "$*"; }

check() {
  local group groups=()
  for group in ${CHECK_GROUPS:-}; do groups+=(--group "$group"); done
  if [ "${#groups[@]}" -eq 0 ]; then
    say "no check before the start (CHECK_GROUPS is empty)"
    return
  fi
  rdt-e2e doctor --config "${CHECK_CONFIG:?names the configuration that is checked}" "${groups[@]}"
}

# A node that joins before the head listens ends at once; not every engine orders containers.
wait_for_head() {
  local deadline=$((SECONDS + wait_s))
  until (exec 3<>"/dev/tcp/${head%:*}/${head##*:}") 2>/dev/null; do
    if [ "$SECONDS" -ge "$deadline" ]; then
      say "no Ray head answers at $head after $wait_s s; is it up, and does the name resolve?" >&2
      exit 1
    fi
    sleep 0.5
  done
}

# Both paths need no token. The agent's says that the raylet lives and that the head knows it.
health() {
  wget --quiet --tries=1 --timeout=5 --output-document=- \
    "http://127.0.0.1:$agent_port/api/local_raylet_healthz" | grep --quiet success
}

start() {
  ulimit -n "$(ulimit -H -n)"
  exec ray start --block --disable-usage-stats --num-cpus="${NUM_CPUS:-2}" --num-gpus="$1" \
    --object-store-memory="${OBJECT_STORE_BYTES:-268435456}" \
    --dashboard-agent-listen-port="$agent_port" "${@:2}"
}

case "${1:-help}" in
  head)
    check
    start 0 --head --port="${head##*:}"
    ;;
  trainer | inference)
    check
    wait_for_head
    # The resource tells the run which fleet belongs here.
    start "${NUM_GPUS:?is the number of GPUs Ray may use here}" --address="$head" \
      --resources="{\"$1\": 1}"
    ;;
  head-trainer)
    check
    start "${NUM_GPUS:?is the number of GPUs Ray may use here}" --head --port="${head##*:}" \
      --resources='{"trainer": 1}'
    ;;
  kuberay)
    check
    ulimit -n "${RAY_START_ULIMIT_OPEN_FILES:-65536}" || say "the open files limit stays $(ulimit -n)"
    # It is written for a shell: words in it are quoted.
    eval "exec $KUBERAY_GEN_RAY_START_CMD"
    ;;
  check) check ;;
  health) health ;;
  help) sed -n '2,/^set /{s/^# \{0,1\}//p}' "$0" ;;
  *) exec "$@" ;;
esac
