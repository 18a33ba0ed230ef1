"""How much is sent to measure a link, and what a byte costs."""

import pytest

from accept_mpi.comm.links import _line, _more


def test_what_a_short_exchange_took_says_how_long_the_next_should_be() -> None:
    assert _more(1 << 20, 0.08, 0.125) == pytest.approx(1.25 * (1 << 20) * 0.125 / 0.08, abs=1)
    assert _more(1 << 16, 0.001, 0.125) == 4 << 16  # so short a one says little
    assert _more(1 << 16, 0.0, 0.125) == 4 << 16
    assert _more(12 << 20, 0.1, 0.125) == 16 << 20  # the most


def test_what_a_byte_costs_follows_from_large_exchanges_of_unlike_sizes() -> None:
    small = [(1 << 16, 1e-4 + 1e-9 * (1 << 16))] * 3
    large = [(n << 20, 1e-4 + 1e-9 * (n << 20)) for n in (3, 4, 5)]
    byte, message = _line([*small, *large, (5 << 20, 1.0)])  # one was disturbed
    assert byte == pytest.approx(1e-9, rel=0.01)
    assert message == pytest.approx(1e-4, rel=0.1)
    assert _line([]) == (0.0, 0.0)
    assert _line([(0, 1.0)]) == (0.0, 0.0)
