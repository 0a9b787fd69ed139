"""The memo of fake operations: what it makes anew is what PyTorch would have made."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from training.memory.op_memo import OpMemo

aten = torch.ops.aten
OPERATIONS = {
    "a new tensor": lambda x: (aten.mul.Tensor, (x, 2.0), {}),
    "another dtype": lambda x: (aten._to_copy.default, (x,), {"dtype": torch.bfloat16}),
    "a matrix product": lambda x: (aten.mm.default, (x, x.new_empty(6, 5)), {}),
    "a view": lambda x: (aten.view.default, (x, [2, 2, 6]), {}),
    "a view that says it is none": lambda x: (aten._unsafe_view.default, (x, [24]), {}),
    "a transposed view": lambda x: (aten.t.default, (x,), {}),
    "a slice": lambda x: (aten.slice.Tensor, (x, 0, 1, 3), {}),
    "an expanded view": lambda x: (aten.expand.default, (x.new_empty(4, 1), [4, 6]), {}),
    "several tensors": lambda x: (aten.split.Tensor, (x, 2), {}),
    "tensors in a list": lambda x: (aten.cat.default, ([x, x], 1), {}),
    "the same tensor": lambda x: (aten.to.dtype, (x, torch.float32), {}),
    "a change in place": lambda x: (aten.mul_.Tensor, (x, 2.0), {}),
}


def described(result, x):
    results = result if isinstance(result, (list, tuple)) else [result]
    return [
        (type(each), each.shape, each.stride(), each.dtype, each.device, each.storage_offset(), each is x,
         each.untyped_storage()._cdata == x.untyped_storage()._cdata, each.untyped_storage().nbytes())
        for each in results
    ]  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_known_operation_gives_what_it_gave(name):
    memo = OpMemo()
    with FakeTensorMode():
        for _ in range(3):
            x = torch.empty(4, 6)
            func, args, kwargs = OPERATIONS[name](x)
            wanted = described(func(*args, **kwargs), x)
            assert described(memo(func, args, kwargs), x) == wanted


def test_another_layout_is_another_operation():
    memo = OpMemo()
    with FakeTensorMode():
        for x in (torch.empty(4, 6), torch.empty(6, 4).t(), torch.empty(4, 6, dtype=torch.bfloat16), torch.empty(4, 8)):
            for other in (2, 2.0, True):
                assert described(memo(aten.mul.Tensor, (x, other), {}), x) == described(x * other, x)
