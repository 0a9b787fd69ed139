"""The audit on networks with planted faults: it finds them, names them, and blames no other layer."""

import math

import pytest
import torch
from torch.nn import Conv2d, LayerNorm, Linear

from training.errors import BadInput
from training.precision import assessment
from training.precision.assessment import choose, describe_picture_error, findings, layers_to_keep, loses_too_much
from training.precision.audit import SAMPLE, Audit, audit_module, copy_in_dtype
from training.precision.audit_chart import amplification, chart, difference_picture
from training.precision.audit_report import AuditPart, report
from training.precision.device import Support
from training.precision.layer_kinds import ATTENTION, NORM
from training.precision.measures import Errors, PictureError, compare_pictures, rescale_error
from training.precision.plan import PrecisionPlan

NATIVE = {"bf16": Support(True, True), "fp16": Support(True, True)}


class HandWrittenNorm(torch.nn.Module):
    """RMS norm as model code often has it: eps is added in the dtype of the input."""

    def __init__(self, dim, eps):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(torch.nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.to_qkv = Linear(dim, 3 * dim)

    def forward(self, x, scale=1.0):
        q, k, v = self.to_qkv(x).chunk(3, -1)
        return torch.softmax(q @ k.transpose(-1, -2) * scale, -1) @ v


class Network(torch.nn.Module):
    """Sound, but for the layer that is put in the middle."""

    def __init__(self, middle, dim=16):
        super().__init__()
        self.first = Linear(dim, dim)
        self.norm = LayerNorm(dim, eps=1e-8)
        self.act = torch.nn.ReLU(inplace=True)
        self.middle = middle
        self.attention = Attention(dim)
        self.last = Linear(dim, dim)

    def forward(self, x):
        x = self.act(self.norm(self.first(x)))
        return self.last(self.attention(self.middle(x), scale=0.25))


def audited(middle, names=("bf16", "fp16"), rows=8):
    torch.manual_seed(0)
    network = Network(middle)
    return network, audit_module(network, (torch.randn(2, rows, 16),), names)


@torch.no_grad()
def whole_error(module, x):
    """Relative error of a module in BF16, by hand."""
    fine, low = module(x), copy_in_dtype(module, torch.bfloat16)(x.bfloat16()).float()
    return float((low - fine).norm() / fine.norm())


def faults(audit):
    return {layer.name: found for layer in audit.layers.values() if (found := findings(layer, audit.names))}


def test_a_sound_network_has_no_findings_and_stays_as_it_was():
    torch.manual_seed(0)
    network = Network(torch.nn.Identity())
    before = {key: value.clone() for key, value in network.state_dict().items()}
    audit = audit_module(network, (torch.randn(2, 8, 16),))
    assert faults(audit) == {}
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in network.modules())


def test_own_errors_are_those_of_rounding_and_the_rest_gathers():
    _, audit = audited(torch.nn.Identity())
    for name, steps in (("bf16", 2.0**-7), ("fp16", 2.0**-10)):
        own = [layer.own[name].relative for layer in audit.layers.values() if name in layer.own]
        assert 0 < max(own) < 2 * steps
        last = audit.layers["last"]
        assert last.so_far[name].relative > last.own[name].relative
    # the same sum done by hand: a layer alone, and the whole
    torch.manual_seed(0)
    network, x = Network(torch.nn.Identity()), torch.randn(2, 8, 16)
    assert audit.layers["first"].own["bf16"].relative == pytest.approx(whole_error(network.first, x), rel=1e-5)
    assert audit.layers["last"].so_far["bf16"].relative == pytest.approx(whole_error(network, x), rel=1e-4)


def test_a_layer_that_works_in_place_is_given_its_input_and_not_its_output():
    _, audit = audited(torch.nn.Identity())
    act = audit.layers["act"]
    assert 1e-5 < act.own["bf16"].relative < 5e-3  # would be off by half its input if it saw what came out
    assert act.largest > 2  # negative values were seen too: the input's largest magnitude


def test_attention_is_run_alone_as_a_whole_and_its_layers_are_not_counted_twice():
    _, audit = audited(torch.nn.Identity())
    attention = audit.layers["attention"]
    assert attention.kind == ATTENTION and not attention.innermost and "bf16" in attention.own
    assert audit.layers["attention.to_qkv"].calls == attention.calls == 1
    assert audit.layers["attention.to_qkv"].level == 2 and audit.layers[""].level == 0
    assert audit.layers[""].own == {} and "bf16" in audit.layers[""].so_far


def test_a_norm_that_loses_its_eps_is_found_in_fp16_and_only_there():
    _, audit = audited(HandWrittenNorm(16, 1e-8))
    norm = audit.layers["middle"]
    assert norm.kind == NORM and norm.eps == 1e-8
    assert norm.loses_eps("fp16") and not norm.loses_eps("bf16")
    assert norm.quiet["bf16"] < 0.02
    assert [name for name, found in faults(audit).items() if "eps" in " ".join(found)] == ["middle"]
    assert not audit.layers["norm"].loses_eps("fp16")  # torch's own keeps the same eps in FP32 inside
    assert audit.layers["norm"].quiet["fp16"] < 0.02


def test_a_hand_written_norm_with_an_eps_that_fp16_can_hold_is_sound():
    _, audit = audited(HandWrittenNorm(16, 1e-3))
    assert not audit.layers["middle"].loses_eps("fp16")
    assert audit.layers["middle"].quiet["fp16"] > 0


def test_a_row_of_zeros_shows_where_a_lost_eps_ends():
    """A black patch, padding: 0 / sqrt(0 + 0)."""
    torch.manual_seed(0)
    norm, x = HandWrittenNorm(16, 1e-8), torch.randn(1, 4, 16)
    x[:, 0] = 0
    audit = audit_module(norm, (x,))
    (layer,) = audit.layers.values()
    assert layer.own["fp16"].not_finite == 16 and math.isinf(layer.own["fp16"].relative)
    assert layer.own["bf16"].not_finite == 0
    assert "fp16: NaN or infinity from finite input" in findings(layer, ("bf16", "fp16"))


class Loud(torch.nn.Module):
    """A value of 7e4 goes in and out between two sound layers."""

    def forward(self, x):
        x = x.clone()
        x[..., 0] = 7e4
        return x


def test_an_overflow_in_fp16_is_seen_in_the_fp32_run_alone():
    torch.manual_seed(0)
    network = torch.nn.Sequential(Linear(16, 16), Loud(), LayerNorm(16))
    audit = audit_module(network, (torch.randn(2, 8, 16),), ("bf16",))  # fp16 was not run at all
    loud = audit.layers["1"]
    assert loud.largest == pytest.approx(7e4) and loud.range_used() > 1
    assert loud.over == 16 and audit.layers["2"].over == 16  # where it comes out, and where it goes in
    assert audit.layers["0"].over == 0
    assert "16 of 512 values overflow in fp16 (largest 7e+04)" in faults(audit)["1"]
    both = audit_module(network, (torch.randn(2, 8, 16),))
    assert both.layers["1"].own["fp16"].not_finite == 16 and both.layers["1"].so_far["fp16"].not_finite == 16
    assert both.layers["1"].own["bf16"].not_finite == 0


def test_the_minus_infinity_of_an_attention_mask_is_no_overflow():
    class Masked(torch.nn.Module):
        def forward(self, x, mask):
            return torch.softmax(x + mask, -1)

    mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), torch.finfo(torch.float32).min)
    audit = audit_module(Masked(), (torch.randn(4, 4, generator=torch.Generator().manual_seed(0)), mask))
    assert faults(audit) == {} and audit.layers[""].largest < 10


class Cancels(torch.nn.Module):
    """Adds a large number and takes it away again: what is small is gone in a short dtype."""

    def forward(self, x):
        return (x + 1000.0) - 1000.0


def test_a_layer_that_loses_more_than_rounding_is_named_and_those_behind_it_are_not():
    _, audit = audited(Cancels())
    assert list(faults(audit)) == ["middle"]
    assert loses_too_much(audit.layers["middle"], "bf16") and loses_too_much(audit.layers["middle"], "fp16")
    assert audit.layers["last"].so_far["bf16"].relative > 0.1 > audit.layers["last"].own["bf16"].relative
    assert layers_to_keep(list(audit.layers.values()), "bf16") == (("middle",), ["middle"])


def test_what_does_not_run_alone_says_why():
    class Stubborn(torch.nn.Module):
        def forward(self, x):
            if x.dtype != torch.float32:
                raise RuntimeError("only float32 is taken here")
            return x

    torch.manual_seed(0)
    audit = Audit(("bf16",))
    network = torch.nn.Sequential(Linear(4, 4), Stubborn())
    with torch.no_grad(), audit.reference(network):
        network(torch.randn(2, 4))
    assert audit.layers["1"].problems == {"bf16": "RuntimeError: only float32 is taken here"}
    assert any("does not run alone" in clause for clause in findings(audit.layers["1"], ("bf16",)))


def test_hooks_are_gone_after_an_interruption():
    class Stop(BaseException):
        pass

    class Stopping(torch.nn.Module):
        def forward(self, x):
            raise Stop

    network = torch.nn.Sequential(Linear(4, 4), Stopping())
    with pytest.raises(Stop), Audit(("bf16",)).reference(network):
        network(torch.randn(2, 4))
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in network.modules())


def test_only_a_sample_of_a_large_output_is_kept_and_it_is_the_same_each_time():
    torch.manual_seed(0)
    network, x = torch.nn.Sequential(Conv2d(3, 32, 3)), torch.randn(1, 3, 66, 66)
    found = []
    for seed in (0, 0, 1):
        audit = audit_module(network, (x,), ("bf16",), seed=seed)
        kept = [sample for samples in audit._samples.values() for sample in samples]
        assert {sample.numel() for sample in kept} == {SAMPLE}
        found.append(audit.layers["0"].so_far["bf16"].relative)
    assert found[0] == found[1] != found[2] and found[0] == pytest.approx(found[2], rel=0.2)
    assert found[0] == pytest.approx(whole_error(network, x), rel=0.1)


# ------------------------------------------------------------------------------------------------------------- measures


def test_pixels_are_best_rescaled_before_the_cast():
    pixels = torch.rand(1, 256, 256, 3, generator=torch.Generator().manual_seed(0))
    after, before = rescale_error(pixels, torch.bfloat16)
    assert after == pytest.approx(6.5e-4, rel=0.03) and before == pytest.approx(1.5e-3, rel=0.04)


def test_errors_count_what_is_not_finite_and_add_up_over_calls():
    errors = Errors()
    errors.add(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0]))
    errors.add(torch.tensor([3.0]), torch.tensor([1.0]))
    assert errors.relative == pytest.approx(math.sqrt(5 / 3)) and errors.largest == 2 and errors.calls == 2
    errors.add(torch.tensor([math.nan, math.inf]), torch.tensor([0.0, math.inf]))
    assert errors.not_finite == 1 and math.isinf(errors.relative) and math.isnan(errors.cosine)


def picture(seed=0, side=64):
    """Smooth colours with some detail, [1, side, side, 3]."""
    noise = torch.rand(1, 3, side // 8, side // 8, generator=torch.Generator().manual_seed(seed))
    smooth = torch.nn.functional.interpolate(noise, size=(side, side), mode="bicubic").clamp(0.1, 0.9)
    return smooth.movedim(1, -1)


def test_picture_errors_tell_noise_from_a_colour_shift():
    fine = picture()
    noise = torch.randn(fine.shape, generator=torch.Generator().manual_seed(1))
    noisy, grey = fine + 0.02 * noise, 0.5 + 0.9 * (fine - 0.5)
    a, b, same = (compare_pictures(x, fine) for x in (noisy, grey, fine))
    assert same.psnr == 100 and same.ssim == pytest.approx(1) and same.colour == same.chroma == 0 and same.fine < -60
    assert a.psnr == pytest.approx(34, abs=0.5) and a.fine > b.fine + 10  # noise is fine, a shift is not
    assert b.chroma < -0.5 < a.chroma  # greyer
    assert a.colour_99 > a.colour > 0


def test_a_difference_below_sight_is_said_to_be_so():
    fine = picture()
    shift = torch.zeros_like(fine)
    shift[..., 0] = 1.0
    words = [assessment.visibility(compare_pictures(fine + size * shift, fine)) for size in (0.0005, 0.2)]
    assert words == ["not visible by eye", "visible by eye"]
    small = compare_pictures(fine + 0.0005 * shift, fine)
    assert "less than 8-bit rounding" in describe_picture_error("bf16 decode", small)
    broken = fine.clone()
    broken[0, 0, 0, 0] = math.nan
    assert not compare_pictures(broken, fine).finite
    assert describe_picture_error("fp16 decode", PictureError.broken()).startswith("fp16 decode: NaN or infinity")


# ---------------------------------------------------------------------------------------------------- plan and pictures


def test_the_plan_takes_the_first_good_dtype_that_the_device_has_and_the_range_allows():
    _, sound = audited(torch.nn.Identity())
    _, loud = audited(Loud())
    layers, over = list(sound.layers.values()), list(loud.layers.values())
    good = {"bf16": (True, "bf16 decode: not visible"), "fp16": (True, "fp16 decode: not visible")}
    assert choose(good, NATIVE, layers).dtype == "bf16"
    assert choose({"fp16": good["fp16"]}, NATIVE, layers).dtype == "fp16"
    found = choose({"fp16": good["fp16"]}, NATIVE, over)
    assert found.dtype == "fp32" and "107% of its range" in found.why
    seen = choose({"bf16": (False, "bf16 decode: visible")}, NATIVE, layers)
    assert (seen.dtype, seen.why) == ("fp32", "bf16 decode: visible")
    emulated = {"bf16": Support(True, False, "this CPU emulates bf16")}
    assert "this CPU emulates bf16" in choose({"bf16": good["bf16"]}, emulated, layers).why
    assert choose({}, NATIVE, layers).dtype == "default"
    assert "middle" in layers_to_keep(over, "fp16")[0]
    assert layers_to_keep(layers, "fp16") == ((), []) and layers_to_keep(over, "fp32") == ((), [])


def test_a_plan_goes_through_json_and_refuses_what_it_does_not_know():
    plan = PrecisionPlan(
        "bf16", "fp8_e4m3fn", ("norms", "out.*"), {"clip_l": ("default", "fp32")}, "bf16", "fp32", {"model": "measured"}
    )
    assert PrecisionPlan.from_json(plan.to_json()) == plan
    assert PrecisionPlan.from_json("{}") == PrecisionPlan()
    for text, said in [
        ("[]", "JSON object"), ("{", "must be JSON"), ('{"vae": "fp32"}', "it got vae"),
        ('{"vae_decoder": "fp5"}', "'fp5'"), ('{"model_compute": "fp8_e5m2"}', "fp8_e5m2"),
        ('{"clip": {"clip_l": "fp32"}}', "[storage, compute]"),
    ]:  # fmt: skip
        with pytest.raises(BadInput, match=r".") as raised:
            PrecisionPlan.from_json(text)
        assert said in str(raised.value)


def test_the_report_names_the_layer_and_the_chart_has_a_row_a_part():
    _, audit = audited(HandWrittenNorm(16, 1e-8))
    parts = [AuditPart("a part", audit, ["bf16: fine"]), AuditPart("another", audit)]
    plan = PrecisionPlan(vae_decoder="fp32", reasons={"VAE decoder": "measured"})
    text = report("Audit", ["a note"], parts, plan)
    assert "- middle: fp16: loses its eps 1e-08" in text and "- a part: bf16: fine" in text
    assert "- VAE decoder: fp32 (measured)" in text and "| middle | norm | 1 |" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in rows}) == 1  # a table that Markdown can lay out
    one, two = chart(parts[:1]), chart(parts)
    assert one.width == two.width and two.height == 2 * one.height


def test_difference_pictures_are_grey_where_nothing_differs_and_say_by_how_much_they_are_amplified():
    difference = torch.zeros(3, 64, 64)
    difference[0, :32] = 1 / 1024
    assert amplification(difference) == 512
    shown = difference_picture(difference, "bf16 decode")
    assert shown.shape == (512 + 28, 512, 3)
    assert shown[300, 5].tolist() == [0.5, 0.5, 0.5] and shown[5, 5].tolist() == [1.0, 0.5, 0.5]
    assert shown[512:].max() > 0.9  # the label
    assert amplification(torch.zeros(3, 8, 8)) == 1
