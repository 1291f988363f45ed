"""Growth per sync, from samples with known slopes."""

import pytest

from rdt_e2e.sync import soak


def sample(number, rss_bytes, **figures):
    return number, {"trainer": [{"rss_bytes": rss_bytes} | figures]}


def test_a_leak_shows_as_growth_per_100_syncs():
    samples = [sample(n, 5e9 + 1e6 * n, num_fds=30, num_registered=7) for n in range(1, 101)]
    slopes = soak._slopes(samples, "trainer", 0)
    assert slopes["rss_bytes"] == pytest.approx(1e8)
    assert slopes["num_fds"] == slopes["num_registered"] == 0
    assert soak._describe(slopes) == "memory +100.00 MB, open files +0.00, registrations +0.00"


def test_what_fills_up_first_is_left_out():
    samples = [sample(n, 1e9 if n <= 20 else 2e9) for n in range(1, 101)]
    assert soak._slopes(samples, "trainer", 0)["rss_bytes"] == pytest.approx(0)


def test_a_figure_that_a_system_does_not_have_is_left_out():
    samples = [sample(n, 1, num_shm=None) for n in range(1, 11)]
    assert set(soak._slopes(samples, "trainer", 0)) == {"rss_bytes"}
