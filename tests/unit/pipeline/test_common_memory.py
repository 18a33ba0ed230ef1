"""What a later stage writes into, and what has values in common with it in an earlier one."""

import torch

from accept_mpi.pipeline.common_memory import HELD, CommonMemory, share_values, versions, why_parted


def test_only_values_in_common_count() -> None:
    x = torch.arange(24.0).view(4, 6)
    left, right = x.chunk(2, 1)
    for one in (x, x.view(-1), x.t(), x[1:, 2:4], x[:1].expand(3, 6), x.detach()):
        assert share_values(x, one)
        assert share_values(one, x)
    for one in (right, x.clone(), x[:0], torch.zeros(3), torch.sparse_coo_tensor(size=(2, 2))):
        assert not share_values(left, one)
    assert share_values(x, x.view(torch.complex64))


def test_a_forward_is_looked_at() -> None:
    with torch.inference_mode():
        uncounted = torch.zeros(3)
    inputs = (torch.zeros(3), None, torch.zeros(3), uncounted)
    counts, memory, buffer, shown = versions(inputs), CommonMemory(), torch.zeros(3), torch.zeros(3)
    inputs[2].add_(1)
    outputs = [inputs[0].view(3, 1), buffer, inputs[0], shown]
    memory.look(inputs, counts, outputs, {"0.weight": torch.zeros(3), "0.table": buffer, f"0.shown{HELD}": shown})
    assert memory == CommonMemory({2}, {(0, 2)}, {(0, 0), (0, 2)}, {1: "0.table", 3: f"0.shown{HELD}"})
    memory.keep_only({"0.shown"})
    assert set(memory.kept) == {1, 3}
    memory.keep_only({"0.other"})
    assert memory.kept == {1: "0.table"}


def test_what_is_handed_through_counts() -> None:
    first = CommonMemory(pairs={(0, 1)}, kept={2: "0.table"})
    through = CommonMemory(through={(0, 1), (1, 2), (2, 0), (3, 3)})
    assert why_parted([first, CommonMemory(written={3})]) is None
    assert why_parted([first, CommonMemory(written={1})]) == (1, "another value that it gives")
    assert why_parted([first, through, CommonMemory(written={3})]) is None
    assert why_parted([first, through, CommonMemory(written={2})]) == (2, "another value that it gives")
    assert why_parted([first, through, CommonMemory(written={0})]) == (2, "0.table")
    only_one = CommonMemory(through={(0, 0)})  # the other view ends here
    assert why_parted([first, only_one, CommonMemory(written={0})]) is None
    assert why_parted([CommonMemory(written={0})]) is None
