"""Every exception this package raises on purpose, in one tree.

RdtE2EError                       1  the run failed
├─ ConfigError                    2  a file, key, flag or combination of settings
├─ EnvironmentCheckError          2  a package, port, cluster or device that is not as needed
├─ CheckpointError                2  the checkpoint on disk is damaged or of an unknown form
│  └─ MissingTensorError          2
├─ PlanError                      2  the checkpoint cannot be laid out or planned as asked
├─ SyncError                      1  the sync started and did not finish
│  ├─ PullTimeoutError            1
│  ├─ GatherError                 1
│  ├─ ProducerLostError           1
│  ├─ ConsumerLostError           1
│  └─ BackendUnavailableError     1
├─ EngineError                    1  the inference engine failed
└─ VerificationError              3  the sync finished and the result is wrong
   ├─ TextMismatchError           3
   └─ WeightMismatchError         3

The number is the exit code of the command-line program.

Each class takes one message. It says what happened, with expected and found, then the fix. These
exceptions travel between Ray processes, so they must survive pickling: a subclass that adds an
argument has to hand it to ``super().__init__`` as well.
"""

from typing import ClassVar


class RdtE2EError(Exception):
    """Base of every expected failure; the command line prints it as one line.

    Attributes:
        exit_code: Exit status of the program when this error ends it.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str) -> None:
        super().__init__(message)


class ConfigError(RdtE2EError):
    """A configuration file, key, flag or combination of settings is not usable."""

    exit_code: ClassVar[int] = 2


class EnvironmentCheckError(RdtE2EError):
    """The machine or cluster lacks something: a package version, a port, Ray, enough GPUs."""

    exit_code: ClassVar[int] = 2


class CheckpointError(RdtE2EError):
    """The checkpoint on disk is damaged, inconsistent or of a form this package does not know."""

    exit_code: ClassVar[int] = 2


class MissingTensorError(CheckpointError):
    """A tensor that the checkpoint must hold is not there."""


class PlanError(RdtE2EError):
    """The checkpoint cannot be laid out or planned with these settings."""

    exit_code: ClassVar[int] = 2


class SyncError(RdtE2EError):
    """A sync started and did not finish; the engine does not resume on its weights."""


class PullTimeoutError(SyncError):
    """A consumer or producer waited past its deadline; the message says who waits for whom."""


class GatherError(SyncError):
    """A gather group could not be assembled on the trainer."""


class ProducerLostError(SyncError):
    """A producer process ended while consumers still needed it."""


class ConsumerLostError(SyncError):
    """A consumer has not been heard from for too long: its process or node is gone, or stopped."""


class BackendUnavailableError(SyncError):
    """A transport backend is missing or did not come up."""


class EngineError(RdtE2EError):
    """The inference engine failed to start, to generate, or to shut down."""


class VerificationError(RdtE2EError):
    """The sync finished, but what arrived is not what was sent."""

    exit_code: ClassVar[int] = 3


class TextMismatchError(VerificationError):
    """Greedy text differs from the reference."""


class WeightMismatchError(VerificationError):
    """A weight in the engine differs from the checkpoint."""
