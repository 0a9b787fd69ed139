"""The host's attention functions and networks, for test_attention_memory.py.

`python tests/host/attention_in_host.py HOST_FOLDER RESULT.json [check ...]`, see in_host.py.
"""

import contextlib

from in_host import comfy, pack, refusal, torch, write_results  # boots the host
from torch.nn import Linear
from torch.nn.attention import SDPBackend, sdpa_kernel

host_attention = comfy.ldm.modules.attention
attention = pack("training.memory.attention")
StorageMeter = pack("training.memory.meter").StorageMeter

FUNCTIONS = {
    "basic": host_attention.attention_basic,
    "split": host_attention.attention_split,
    "sub-quadratic": host_attention.attention_sub_quad,
    "pytorch": host_attention.attention_pytorch,
    "pytorch math": host_attention.attention_pytorch,
}
MIB = 2**20

# batch, heads, queries, keys, head size: odd, cross, one head, one picture, longer than the chunks of sub-quadratic
SHAPES = (
    (1, 8, 256, 256, 40),
    (2, 8, 1024, 77, 40),
    (2, 3, 255, 255, 20),
    (1, 1, 300, 300, 64),
    (4, 5, 144, 144, 64),
    (1, 2, 4500, 333, 16),
)


@contextlib.contextmanager
def free_memory(free):
    """The host believes that so many bytes are free."""
    module = host_attention.model_management
    kept = module.get_free_memory
    module.get_free_memory = lambda device=None, torch_free_too=False: (free, free) if torch_free_too else free
    try:
        yield
    finally:
        module.get_free_memory = kept


def measure(call, backend, dtype):
    """The allocation peak of the real function, in bytes; or {"refused": what it said}."""
    b, h, d = call.batch, call.heads, call.head_dim
    if call.split_heads:  # v is a view of the fused projection, as in Flux
        q, k = torch.randn(b, h, call.q_tokens, d, dtype=dtype), torch.randn(b, h, call.k_tokens, d, dtype=dtype)
        v = torch.randn(b, call.k_tokens, h, d, dtype=dtype).transpose(1, 2)
    else:
        q, k, v = (torch.randn(b, n, h * d, dtype=dtype) for n in (call.q_tokens, call.k_tokens, call.k_tokens))
    kernel = sdpa_kernel(SDPBackend.MATH) if backend == "pytorch math" else contextlib.nullcontext()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(call.half_math)
    options = {"attn_precision": torch.float32 if call.upcast else None, "skip_reshape": call.split_heads}
    try:
        with kernel, free_memory(call.free), StorageMeter(q, k, v) as meter:
            FUNCTIONS[backend](q, k, v, h, **options)
    except RuntimeError as refused:
        return {"refused": str(refused)}
    return meter.peak


def check_peaks():
    """[backend, what the call is, estimate, measured] for every backend that runs on a CPU."""
    found = []
    for b, h, q, k, d in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            for upcast in (False, True) if dtype == torch.bfloat16 else (False,):
                for split_heads in (False, True):
                    for free in (2**40, 2 * MIB, MIB // 4):
                        options = {"half_math": not upcast, "gpu": False, "free": free}
                        shape = (b, h, q, k, d, dtype.itemsize, upcast, split_heads)
                        call = attention.AttentionCall(*shape, **options)
                        for backend in FUNCTIONS:
                            if free < 2**40 and backend not in ("split", "sub-quadratic"):
                                continue
                            peak = attention.attention_peak(call, backend)
                            said = {"refused": peak.refused} if peak.refused else peak.total
                            found.append([backend, str(call), said, measure(call, backend, dtype)])
    return found


def networks():
    """The host's own networks in the presets' shapes, on "meta": no memory. name -> (network, channels)"""
    build = {"dtype": torch.float16, "device": "meta", "operations": comfy.ops.disable_weight_init}
    from comfy.ldm.flux.model import Flux
    from comfy.ldm.modules.diffusionmodules.mmdit import OpenAISignatureMMDITWrapper
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
    from comfy.ldm.wan.model import WanModel

    unet = dict(image_size=32, in_channels=4, out_channels=4, use_spatial_transformer=True, legacy=False, **build)
    yield "SD1.5", 4, UNetModel(
        model_channels=320, num_res_blocks=[2] * 4, channel_mult=[1, 2, 4, 4], num_heads=8, context_dim=768,
        transformer_depth=[1] * 6 + [0, 0], transformer_depth_output=[1] * 9 + [0] * 3, transformer_depth_middle=1,
        **unet,
    )  # fmt: skip
    yield "SDXL", 4, UNetModel(
        model_channels=320, num_res_blocks=[2] * 3, channel_mult=[1, 2, 4], num_head_channels=64, context_dim=2048,
        transformer_depth=[0, 0, 2, 2, 10, 10], transformer_depth_output=[0] * 3 + [2] * 3 + [10] * 3,
        transformer_depth_middle=10, use_linear_in_transformer=True, num_classes="sequential", adm_in_channels=2816,
        **unet,
    )  # fmt: skip
    yield "SDXL refiner", 4, UNetModel(
        model_channels=384, num_res_blocks=[2] * 4, channel_mult=[1, 2, 4, 4], num_head_channels=64, context_dim=1280,
        transformer_depth=[0, 0, 4, 4, 4, 4, 0, 0], transformer_depth_output=[0] * 3 + [4] * 6 + [0] * 3,
        transformer_depth_middle=4, use_linear_in_transformer=True, num_classes="sequential", adm_in_channels=2560,
        **unet,
    )  # fmt: skip
    text = {"target": "torch.nn.Linear", "params": {"in_features": 4096, "out_features": 1536}}
    yield "SD3", 16, OpenAISignatureMMDITWrapper(
        input_size=None, patch_size=2, in_channels=16, depth=24, num_patches=36864, pos_embed_max_size=192,
        adm_in_channels=2048, context_embedder_config=text, **build,
    )  # fmt: skip
    yield "Flux", 16, Flux(
        image_model="flux", in_channels=16, out_channels=16, vec_in_dim=768, context_in_dim=4096, hidden_size=3072,
        mlp_ratio=4.0, num_heads=24, depth=19, depth_single_blocks=38, axes_dim=[16, 56, 56], theta=10000,
        patch_size=2, qkv_bias=True, guidance_embed=True, **build,
    )  # fmt: skip
    for name, dim, wide, heads, layers in (("Wan 1.3B", 1536, 8960, 12, 30), ("Wan 14B", 5120, 13824, 40, 40)):
        yield name, 16, WanModel(
            model_type="t2v", dim=dim, ffn_dim=wide, num_heads=heads, num_layers=layers, in_dim=16, out_dim=16,
            freq_dim=256, text_dim=4096, window_size=(-1, -1), qk_norm=True, cross_attn_norm=True, eps=1e-6, **build,
        )  # fmt: skip


def check_presets():
    """name -> [what is read from the host's network, the preset], as texts."""
    read = pack("nodes.host.model.shapes").network_shape
    presets = pack("training.memory.models").PRESETS
    return {name: [str(read(net, name, channels, 8)), str(presets[name])] for name, channels, net in networks()}


def check_unreadable():
    """What is said of networks that cannot be read."""
    read = pack("nodes.host.model.shapes").network_shape
    return refusal(lambda: read(Linear(2, 2), "Mochi", 12, 8))


def check_sequence():
    """[attention calls of a real forward of a small UNet as (batch, queries, keys, heads), those predicted], sorted.

    Odd sides, so that halving and rounding show.
    """
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    net = UNetModel(
        image_size=32, in_channels=4, out_channels=4, model_channels=32, num_res_blocks=[2, 1, 1],
        channel_mult=[1, 2, 2], num_heads=4, context_dim=24, transformer_depth=[1, 1, 2, 0],
        transformer_depth_output=[1, 1, 1, 2, 2, 0, 0], transformer_depth_middle=1, use_spatial_transformer=True,
        legacy=False, dtype=torch.float32, operations=comfy.ops.disable_weight_init,
    )  # fmt: skip
    shape = pack("nodes.host.model.shapes").network_shape(net, "small", 4, 8)
    calls = []

    def record(function, q, k, v, heads, *args, **kwargs):
        calls.append([q.shape[0], q.shape[1], k.shape[1], heads, q.shape[2] // heads])
        return function(q, k, v, heads, *args, **kwargs)

    options = {"optimized_attention_override": record}
    width, height = 1366 // 8, 85  # -> 170 x 10 cells, then 85 x 5 and 43 x 3
    net(torch.randn(2, 4, height // 8, width), torch.zeros(2), torch.randn(2, 7, 24), transformer_options=options)
    expected = []
    for layer in shape.layers(shape.latent(1366, height), 4, cfg=True, text=7):
        call = layer.call
        expected += [[call.batch, call.q_tokens, call.k_tokens, call.heads, call.head_dim]] * layer.count
    return [sorted(calls), sorted(expected)]


if __name__ == "__main__":
    checks = (check_peaks, check_presets, check_unreadable, check_sequence)
    write_results({check.__name__.removeprefix("check_"): check for check in checks})
