"""How figures are written for people. None is "n/a" everywhere; GB is 10^9 bytes."""

UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
NOT_AVAILABLE = "n/a"


def seconds(value: float | None) -> str:
    """Seconds with a precision that fits them: 2.31, 0.042, 0.0004."""
    if value is None:
        return NOT_AVAILABLE
    digits = 2 if abs(value) >= 1 else 3 if abs(value) >= 0.01 or value == 0 else 4
    return f"{value:.{digits}f}"


def with_unit(value: float | None) -> str:
    """The same with its unit."""
    return NOT_AVAILABLE if value is None else f"{seconds(value)} s"


def size(value: float | None) -> str:
    """Bytes in the largest unit that leaves at least 1."""
    if value is None:
        return NOT_AVAILABLE
    for unit, name in UNITS:
        if abs(value) >= unit:
            return f"{value / unit:.1f} {name}"
    return f"{value:.0f} B"


def gb_per_s(value: float | None) -> str:
    """10^9 bytes per second."""
    if value is None:
        return NOT_AVAILABLE
    return f"{value:.3f}" if value < 1 else f"{value:.1f}"


def count(value: float | None) -> str:
    """A whole number."""
    return NOT_AVAILABLE if value is None else f"{value:,.0f}"


def percent(value: float | None) -> str:
    """A share of 1 as a percentage."""
    return NOT_AVAILABLE if value is None else f"{100 * value:.1f} %"


def ratio(value: float | None) -> str:
    """A quotient."""
    return NOT_AVAILABLE if value is None else f"{value:.2f}"
