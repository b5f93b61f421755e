"""Experts in four bits: MXFP4's codes and numbers bit for bit, and the decoder layer's node over them (`expert_adapters`)."""

import importlib
import itertools

import torch

from tests.ops.common import BF16, CPU, FP16, FP32, errors_in, leaf, limit, on_cpu, randn
from tests.ops.decoder_nodes import part_of
from tests.ops.expert_adapters import BOTH, adapted_leaves, arguments_of
from tests.ops.generated import generated

FP64 = torch.float64


def four_bits_of(ops):
    return importlib.import_module(f"{ops.__name__}.shared.ops.four_bits")


def number_of(code: int, scale: int) -> float:
    """What a code of e2m1 (sign, two bits of exponent, one of mantissa) stands for in a block with a scale."""
    if scale == 255:
        return float("nan")
    exponent, mantissa = code >> 1 & 3, code & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return (-1.0 if code & 8 else 1.0) * size * 2.0 ** (scale - 127)


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    numbers = torch.where(expected.isnan(), 0.0, expected)
    signs = torch.equal(found.nan_to_num(0.0, torch.inf, -torch.inf).signbit(), numbers.signbit())
    return torch.equal(found.isnan(), expected.isnan()) and torch.equal(found.nan_to_num(0.0, torch.inf, -torch.inf), numbers) and signs


def check_numbers(ops, device):
    """Every byte with every scale."""
    module = four_bits_of(ops)
    byte, scale = torch.arange(256, dtype=torch.uint8), torch.arange(256, dtype=torch.uint8)
    blocks, scales = byte.view(1, 16, 16).repeat(256, 1, 1).to(device), scale[:, None].repeat(1, 16).to(device)
    found = {dtype: module.dense_of_blocks(blocks, scales, dtype) for dtype in (BF16, FP16, FP32, FP64)}
    exact = torch.tensor([[(number_of(b & 15, s), number_of(b >> 4, s)) for b in range(256)] for s in range(256)], dtype=FP64).flatten(1)
    for dtype, numbers in found.items():
        assert numbers.dtype == dtype and same_bits(numbers.cpu(), exact.to(dtype)), f"numbers in {dtype}"
    assert torch.equal(found[BF16][:254].double(), found[FP32][:254].double()), "bf16 holds them all"


def check_slabs(ops, device):
    """Taken apart in several turns, of which the last one is shorter."""
    module = four_bits_of(ops)
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (2, 5, 3, 16), dtype=torch.uint8, generator=generator).to(device)
    scales = torch.randint(100, 150, (2, 5, 3), dtype=torch.uint8, generator=generator).to(device)
    whole, before = module.dense_of_blocks(blocks, scales, BF16), module.SLAB
    assert whole.shape == (2, 5, 96)
    try:
        for module.SLAB in (1, 7, 30):
            assert torch.equal(module.dense_of_blocks(blocks, scales, BF16), whole)
    finally:
        module.SLAB = before
    assert torch.equal(module.dense_of_blocks(blocks[1:, 2:], scales[1:, 2:], BF16), whole[1:, 2:])
    assert module.dense_of_blocks(blocks[:0], scales[:0], BF16).shape == (0, 5, 96)


def check_parts(ops, device, dtype=BF16, experts=3, rows=40, columns=128):
    """Parts of the rows and of a row's numbers are those of the whole."""
    module = four_bits_of(ops)
    generator = torch.Generator().manual_seed(3)
    blocks = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=generator).to(device)
    scales = torch.randint(250, (experts, rows, columns // 32), dtype=torch.uint8, generator=generator).to(device)
    whole = module.dense_of_blocks(blocks, scales, dtype)
    for start, stop in ((0, 32), (32, columns), (64, 96), (0, columns)):
        found = module.dense_of_blocks(blocks, scales, dtype, 2, slice(start, stop))
        assert torch.equal(found, whole[:, :, start:stop]), f"numbers {start} to {stop} of rows"
    for start, stop in ((0, 32), (32, rows), (7, 8), (0, rows)):
        found = module.dense_of_blocks(blocks, scales, dtype, 1, slice(start, stop))
        assert torch.equal(found, whole[:, start:stop]), f"rows {start} to {stop}"


def check_coded_gemm(ops, device, counts=(70, 0, 129, 3), deep=96, columns=608):
    """A grouped GEMM over parts of a weight in codes has the bits of one over the weight, in both orders in memory."""
    module = four_bits_of(ops)
    gemms = importlib.import_module(f"{ops.__name__}.shared.ops.grouped_gemm")
    ends = torch.tensor(counts, device=device).cumsum(0, dtype=torch.int32)
    x = randn(sum(counts), deep, dtype=BF16, device=device, seed=4)
    for rows, numbers in ((columns, deep), (deep, columns)):
        blocks, scales = module.blocks_of(randn(len(counts), rows, numbers, dtype=BF16, device=device, seed=5))
        made = []

        def make(dim, part, blocks=blocks, scales=scales, made=made):
            made.append(module.dense_of_blocks(blocks, scales, BF16, dim, part))
            return made[-1]

        weight = module.CodedExperts(make, torch.Size((len(counts), rows, numbers)), BF16, blocks.device, True)
        weight = weight if numbers == columns else weight.transpose(1, 2)
        groups = gemms.Groups(ends, x.shape[0])
        expected = gemms.grouped_mm(x, module.dense(weight), groups)
        made.clear()
        with limit(ops, "grouped_gemm", "PART", 2 * len(counts) * deep * 300):
            assert torch.equal(gemms.coded_mm(x, weight, groups), expected), "the bits of the whole weight"
            sizes = [each.numel() // (len(counts) * deep) for each in made]
            assert sizes in ([256] * (columns // 256) + [columns % 256], [columns]), f"made {sizes} columns at once"
            made.clear()
            gemms.coded_mm(x, weight._replace(in_parts=False), groups)
            assert len(made) == 1, "made in parts where that takes longer"


def check_tiles(ops, device, blocks=1000):
    """A weight of several tiles of blocks in bf16, the last one short, has the bits of a table's numbers."""
    module = four_bits_of(ops)
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(256, (blocks, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(255, (blocks,), dtype=torch.uint8, generator=generator)
    table = torch.tensor([number_of(code, 127) for code in range(16)], dtype=FP64)
    exact = torch.stack((table[codes.long() & 15], table[codes.long() >> 4]), -1).flatten(1) * torch.exp2(scales.double() - 127)[:, None]
    found = module.dense_of_blocks(codes.to(device)[None], scales.to(device)[None], BF16)
    assert same_bits(found.cpu().flatten(), exact.flatten().to(BF16)), "numbers of many blocks"


def check_offsets(ops, device):
    """Codes and scales that do not begin at whole words."""
    module = four_bits_of(ops)
    generator = torch.Generator().manual_seed(2)
    codes, scales = (torch.randint(200, (64 * n + 16,), dtype=torch.uint8, generator=generator).to(device) for n in (16, 1))
    for of_codes, of_scales in ((0, 0), (0, 3), (5, 0), (16, 4)):
        found = codes[of_codes:][:1024].view(64, 16), scales[of_scales:][:64]
        expected = module.dense_of_blocks(*found, FP32).to(BF16)
        assert same_bits(module.dense_of_blocks(*found, BF16), expected), f"from byte {of_codes}, scales from byte {of_scales}"


def check_codes(ops, device, dtype):
    """The nearest number of a block, of two at one distance the one whose last bit is zero, with the least scale that saturates nothing."""
    module = four_bits_of(ops)
    weight = randn(2, 48, 96, dtype=dtype, device=CPU)
    weight[0] *= torch.exp2(torch.arange(48.0) - 24)[:, None].to(dtype) if dtype != FP16 else 1
    weight[1, 0], weight[1, 1], weight[1, 2, :32] = 0.0, -0.0, -6.0
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    weight[1, 3, :16], weight[1, 3, 16:32] = torch.cat((middles, -middles)).to(dtype), torch.cat((middles, -middles)).to(dtype) / 2
    blocks, scales = (each.cpu() for each in module.blocks_of(weight.to(device)))
    exact = weight.double().unflatten(-1, (-1, 32))
    largest = exact.abs().amax(-1)
    power = torch.where(largest > 0, torch.ceil(torch.log2(largest.clamp(min=2.0**-140) / 6)), -127.0).clamp(min=-127)
    assert torch.equal(scales.double() - 127, power), "scales"
    divided = exact / torch.exp2(power)[..., None]
    table = torch.tensor([number_of(code, 127) for code in range(8)], dtype=FP64)
    distance = (divided.abs()[..., None] - table).abs()
    nearest = distance == distance.amin(-1, keepdim=True)
    even = torch.tensor([2, 1] * 4)
    codes = (nearest * even).argmax(-1) | (divided.signbit().long() << 3)
    assert torch.equal(blocks.long(), (codes[..., ::2] | codes[..., 1::2] << 4)), "codes"
    numbers = module.dense_of_blocks(blocks, scales, FP32)
    again = module.blocks_of(numbers)
    assert same_bits(module.dense_of_blocks(*again, FP32), numbers), "numbers of such blocks are not rounded again"


def coded_weights(ops, leaves, gpt_oss):
    """The leaves with weights that MXFP4 holds, and the same weights in codes."""
    module, coded = four_bits_of(ops), {}
    for name in BOTH:
        weight = leaves[name].detach()
        blocks, scales = module.blocks_of(weight.transpose(1, 2) if gpt_oss else weight)

        def make(dim, part, blocks=blocks, scales=scales, dtype=weight.dtype):
            found = module.dense_of_blocks(blocks, scales, dtype, 3 - dim if gpt_oss else dim, part)
            return found.transpose(1, 2) if gpt_oss else found

        coded[name] = module.CodedExperts(make, weight.shape, weight.dtype, weight.device, True)
        leaves[name] = leaf(make(2, slice(None))).requires_grad_(False)
        turned = coded[name].transpose(1, 2)
        assert turned.shape == module.dense(turned).shape, "the shape of a weight the other way"
    return leaves, coded


def check_coded_experts(ops, device, dtype=BF16, *, width=32, gpt_oss=False, on=BOTH, coded=BOTH, recompute=False, again=False,
                        tokens=11, tile=0):
    """The bits that the numbers give, and nothing of a weight's size is kept for the backward pass. coded: the weights in codes. again: a
    second backward pass. tile: of `norm_experts`."""
    sparse, found = part_of(ops, "sparse"), []
    for names in ((), coded):
        leaves, codes = coded_weights(ops, adapted_leaves(dtype, device, tokens, 64, width, 5, 8, on, False, gpt_oss), gpt_oss)
        for name, tensor in leaves.items():
            tensor.requires_grad_(name not in coded)
        arguments, options = arguments_of(ops, leaves | {name: codes[name] for name in names}, 2, (2.0, 0.6), gpt_oss)
        kept: list = []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor, kept=kept: kept.append(tensor) or tensor, lambda tensor: tensor):
            y = sparse.norm_experts(*arguments, recompute=recompute, tile=tile, **options)
        numbers = {leaves[name].numel() for name in names}
        assert not [tensor for tensor in kept if tensor.dim() == 3 and tensor.numel() in numbers], "a weight is kept"
        dy = randn(*y.shape, dtype=dtype, device=device, seed=9)
        for _ in range(1 + again):
            for tensor in leaves.values():
                tensor.grad = None
            y.backward(dy, retain_graph=again)
        found.append([y.detach(), *(tensor.grad for name, tensor in leaves.items() if name not in coded)])
    assert len(found[0]) > 3 and all(torch.equal(a, b) for a, b in zip(*found, strict=True)), "not the bits of the numbers"


def check_coded_experts_in_parts(ops, device, **options):
    with limit(ops, "grouped_gemm", "PART", 1):
        check_coded_experts(ops, device, width=160, **options)


def check_reference(ops):
    """PyTorch's operations over weights in codes, as for tensors that no kernel takes."""
    sparse, found = part_of(ops, "sparse"), []
    leaves, codes = coded_weights(ops, adapted_leaves(FP64, CPU, 7, 64, 32, 5, 4, BOTH, False, True), True)
    for weights in ({}, codes):
        arguments, options = arguments_of(ops, leaves | weights, 2, (2.0, 0.6), True)
        x, rest = arguments[0], arguments[1:]
        found.append(torch.func.grad(lambda x, rest=rest, options=options: sparse.norm_experts(x, *rest, **options).square().sum())(x))
    assert torch.equal(*found)


def check_wrong_codes(ops):
    """Codes of another shape or dtype are refused by name."""
    for name, change in itertools.product(BOTH, ({"shape": torch.Size((5, 8, 8))}, {"dtype": FP16}, {"shape": torch.Size((8, 8))})):
        leaves, codes = coded_weights(ops, adapted_leaves(BF16, CPU, 3, 64, 32, 5, 2, (), False, False), False)
        arguments, options = arguments_of(ops, leaves | codes | {name: codes[name]._replace(**change)}, 2, (1.0, 1.0), False)
        try:
            part_of(ops, "sparse").norm_experts(*arguments, **options)
        except ValueError as error:
            assert "weights." in str(error), error
        else:
            raise AssertionError(f"{name} is taken")


# ---------------------------------------------------------------- planted errors
CHECKS = {
    "numbers": on_cpu(check_numbers),
    "slabs": on_cpu(check_slabs),
    "tiles": on_cpu(check_tiles),
    "offsets": on_cpu(check_offsets),
    "parts": on_cpu(check_parts),
    "parts_wide": on_cpu(check_parts, FP32),
    "gemm": on_cpu(check_coded_gemm),
    "codes": on_cpu(check_codes, FP32),
    "codes_half": on_cpu(check_codes, BF16),
    "coded": on_cpu(check_coded_experts),
    "coded_gpt_oss": on_cpu(check_coded_experts, gpt_oss=True),
    "coded_again": on_cpu(check_coded_experts, FP32, gpt_oss=True, recompute=True, again=True, on=("down",)),
    "coded_parts": on_cpu(check_coded_experts_in_parts, gpt_oss=True),
    "coded_parts_other": on_cpu(check_coded_experts_in_parts, on=("gate_up",), recompute=True),
    "coded_tiles": on_cpu(check_coded_experts, gpt_oss=True, tokens=40, tile=16),
    "coded_one": on_cpu(check_coded_experts, coded=("gate_up",), on=()),
    "coded_other": on_cpu(check_coded_experts, FP16, coded=("down",), on=("gate_up",), recompute=True),
    "coded_reference": check_reference,
    "coded_wrong": check_wrong_codes,
}
_CODES, _SPARSE = "shared/ops/four_bits.py", "shared/decoder/sparse.py"
MUTANTS = [
    *generated(_CODES, "codes or numbers or parts or coded", "_chosen _table blocks_of dense"),
    *generated("kernel_src/four_bits.py", "numbers", "decode_mxfp4 number power_of"),
    *errors_in(_CODES, "slabs", "dense_of_blocks",
         ("start + SLAB)", "start + SLAB - 1)"),
         ("(scales[place].int()[:, None] << 8)", "(scales[place].int()[:, None] << 7)", "numbers"), kernels=False),
    *errors_in(_CODES, "slabs", "dense_of_blocks",
         ("blocks.reshape(-1, PAIRS)", "blocks.transpose(0, 1).reshape(-1, PAIRS)"),
         ("scales.reshape(-1)", "scales.transpose(0, 1).reshape(-1)")),
    *errors_in("kernel_src/four_bits.py", "numbers", "decode_mxfp4",
         ("block // 4", "block % 4"),
         ("[None, :]), check_bounds=True, padding_value=0)", "[None, :]), check_bounds=False)", "tiles"),
         ("block // 4, check_bounds=True, padding_value=0)", "block // 4, check_bounds=False)", "tiles")),
    *errors_in(_CODES, "codes", "blocks_of",
         ("bounds[list(UP)] = torch.nextafter(bounds[list(UP)], torch.zeros((), device=weight.device))", "pass")),
    *errors_in(_CODES, "coded_gpt_oss", "CodedExperts.transpose",
         ("self.make(3 - dim, part).transpose", "2 * self.make(3 - dim, part).transpose"),
         ("(experts, columns, rows)", "(experts, rows, columns)")),
    *errors_in(_CODES, "parts_wide", "dense_of_blocks", ("first : first + width", ":width"), kernels=False),
    *errors_in("shared/ops/grouped_gemm.py", "gemm", "coded_mm",
         ("weight.in_parts and ", ""),
         ("range(0, columns, width)", "range(0, columns - width, width)"),
         ("out[:, part]", "out[:, : part.stop - part.start]"),
         ("* WIDTH), 1)", "* WIDTH // 2), 1)")),
    *errors_in(_SPARSE, "coded_wrong", "_check", ('"weights.gate_up", gate_up', '"weights.gate_up", tensors.gate_up')),
    *errors_in(_SPARSE, "coded_reference", "norm_experts_reference",
         ("dense(gate_up), dense(down)", "dense(gate_up), dense(down) * (1 + isinstance(down, tuple))")),
]  # fmt: skip


# ---------------------------------------------------------------- in the tests of every operation
GPU_TESTS = {"four_bits": ("test_gpt_oss.py::test_numbers_of_four_bits",)}
