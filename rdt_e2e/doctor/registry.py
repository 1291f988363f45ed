"""All checks, in the order in which they are printed."""

from collections.abc import Sequence

from rdt_e2e.doctor import (
    gpu,
    image,
    kubernetes,
    model,
    nixl,
    node,
    pair_checks,
    rails,
    ray,
    vllm,
)
from rdt_e2e.doctor.finding import Check, Theme
from rdt_e2e.errors import ConfigError

THEMES: tuple[Theme, ...] = (
    image.THEME,
    node.THEME,
    gpu.THEME,
    # `rails` adds its checks to this one.
    rails.THEME,
    nixl.THEME,
    ray.THEME,
    vllm.THEME,
    model.THEME,
    kubernetes.THEME,
    pair_checks.THEME,
)
"""One per group."""

CHECKS: dict[str, Check] = {check.id: check for theme in THEMES for check in theme.checks}
"""Every check by its id."""


def select(
    groups: Sequence[str], *, at_build: bool = False, with_pair: bool = False
) -> list[tuple[Theme, list[Check]]]:
    """Choose checks.

    Args:
        groups: Groups to keep; all when empty.
        at_build: Keep only what an image build can answer.
        with_pair: Keep the checks between two nodes, which need a cluster.

    Returns:
        Themes with their chosen checks; none is empty.

    Raises:
        ConfigError: There is no such group.
    """
    known = [theme.group for theme in THEMES]
    for group in groups:
        if group not in known:
            raise ConfigError(
                f"command line: --group {group} is not a group of checks; there are "
                f"{', '.join(known)}"
            )
    chosen = []
    for theme in THEMES:
        if groups and theme.group not in groups:
            continue
        if theme is pair_checks.THEME and not with_pair:
            continue
        checks = [check for check in theme.checks if check.at_build or not at_build]
        if checks:
            chosen.append((theme, checks))
    return chosen


def find(check_id: str) -> Check:
    """A check by its id.

    Raises:
        ConfigError: There is none; the message names those of its group, or the groups.
    """
    if check_id in CHECKS:
        return CHECKS[check_id]
    group = check_id.partition(".")[0]
    near = [known for known in CHECKS if known.startswith(f"{group}.")]
    there_are = ", ".join(near or [theme.group + ".*" for theme in THEMES])
    raise ConfigError(f"command line: there is no check {check_id!r}; there are {there_are}")
