"""vLLM on a CPU: greedy tokens and log-probabilities of checkpoints, as a script for the interpreter that has vLLM.

vLLM parses, merges and loads a checkpoint as always. Kernels that CPUs lack (all but those of 8-bit integers and
4-bit grids) are replaced by plain arithmetic on the parameters that vLLM has loaded: decode, round the inputs as
compressed-tensors does, multiply.

    python vllm_on_cpu.py request.json answer.json
"""

import json
import os
import sys
from types import SimpleNamespace

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from vllm.model_executor.kernels.linear.mixed_precision import cpu as grids
from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors_embedding, schemes

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
E4M3 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True}
INPUTS = {
    "token": QuantizationArgs(**E4M3, strategy="token"),
    "group128": QuantizationArgs(**E4M3, strategy="group", group_size=128),
    "mxfp8": QuantizationArgs(**E4M3, strategy="group", group_size=32, scale_dtype=torch.uint8),
    "mxfp4": QuantizationArgs(
        **{**E4M3, "num_bits": 4}, strategy="group", group_size=32, scale_dtype=torch.uint8
    ),
    "nvfp4": QuantizationArgs(
        **{**E4M3, "num_bits": 4, "dynamic": "local"},
        strategy="tensor_group",
        group_size=16,
        scale_dtype=torch.float8_e4m3fn,
    ),
}


def rounded(x, kind, global_scale=None):
    """Inputs (tokens, in) as compressed-tensors rounds them."""
    args, x = INPUTS[kind], x[None]
    scale, zero = compute_dynamic_scales_and_zp(x, args, None, global_scale=global_scale)
    return fake_quantize(x, scale, zero, args, global_scale=global_scale)[0].to(x.dtype)


class Plain:
    """A kernel of plain arithmetic: ``decode(layer)`` gives the matrix, ``round_inputs(layer, x)`` the inputs."""

    def __init__(self, decode, round_inputs=lambda layer, x: x):
        self.decode, self.round_inputs, self.config = decode, round_inputs, SimpleNamespace()

    def input_quant_key(self):
        return None

    def process_weights_after_loading(self, layer):
        layer.dense = torch.nn.Parameter(self.decode(layer).to(torch.bfloat16), requires_grad=False)

    def apply_weights(self, layer, x, bias=None):
        flat = self.round_inputs(layer, x.reshape(-1, x.shape[-1]))
        return torch.nn.functional.linear(flat, layer.dense, bias).view(*x.shape[:-1], -1)


def nibbles(packed):
    return torch.stack([E2M1[(packed & 15).int()], E2M1[(packed >> 4).int()]], dim=-1).flatten(1)


def spread(scale, columns):
    return scale.repeat_interleave(-(-columns // scale.shape[1]), dim=1)[:, :columns]


def nvfp4(use_a16=False):
    def decode(layer):
        scale = layer.weight_scale.float() * layer.weight_global_scale
        return nibbles(layer.weight.data) * spread(scale, 2 * layer.weight.shape[1])

    def inputs(layer, x):
        return x if use_a16 else rounded(x, "nvfp4", layer.input_global_scale_inv)

    return Plain(decode, inputs)


def powers(layer, columns):
    return spread(torch.exp2(layer.weight_scale.data.float() - 127), columns)


def mxfp4(**_):
    return Plain(
        lambda layer: nibbles(layer.weight.data) * powers(layer, 2 * layer.weight.shape[1]),
        lambda layer, x: rounded(x, "mxfp4"),
    )


def mxfp8(**_):
    return Plain(
        lambda layer: layer.weight.data.float() * powers(layer, layer.weight.shape[1]),
        lambda layer, x: rounded(x, "mxfp8"),
    )


def e4m3(layer):
    """Rows with a scale each, or blocks of 128 x 128; vLLM turns the first kind over."""
    weight = layer.weight.data.float()
    scale = getattr(layer, "weight_scale", None)
    scale = (layer.weight_scale_inv if scale is None else scale).data.to(torch.bfloat16).float()
    if layer.weight_block_size is None:
        return weight.T * scale.view(-1, 1)
    rows = scale.repeat_interleave(128, dim=0)[: len(weight)]
    return weight * rows.repeat_interleave(128, dim=1)[:, : weight.shape[1]]


def fp8(activation_quant_key, weight_quant_key, **_):
    kind = "group128" if activation_quant_key.scale.group_shape.col == 128 else "token"
    return Plain(e4m3, lambda layer, x: rounded(x, kind))


def unpacked(words, bits, count):
    """(out, words) int32 -> (out, count): a stream of bits without gaps, least significant first."""
    words = torch.nn.functional.pad(words.to(torch.int64) & 0xFFFFFFFF, (0, 1))
    start = torch.arange(count) * bits
    word, shift = start // 32, start % 32
    return ((words[:, word] | (words[:, word + 1] << 32)) >> shift) & ((1 << bits) - 1)


def grid(self, layer):
    """An integer grid of any width, with or without zero points."""
    config = self.config
    bits, (columns, rows) = config.weight_type.size_bits, config.partition_weight_shape
    scale = getattr(layer, self.w_s_name).data.float()
    codes = unpacked(getattr(layer, self.w_q_name).data, bits, columns).float()
    if config.zero_points:
        zero = unpacked(getattr(layer, self.w_zp_name).data.T.contiguous(), bits, rows).T.float()
    else:
        zero = torch.full_like(scale, float(config.weight_type.bias))
    values = (codes.view(rows, scale.shape[1], -1) - zero[..., None]) * scale[..., None]
    layer.dense = torch.nn.Parameter(values.flatten(1).to(config.act_type), requires_grad=False)


def rows(ids, packed, scale, columns, bits):
    """Rows of a packed embedding, whose words hold whole codes: its kernel is written in Triton."""
    shifts = torch.arange(0, 32, bits)
    codes = (packed.data[ids].to(torch.int64)[..., None] >> shifts) & ((1 << bits) - 1)
    values = codes.flatten(1)[:, :columns].float() - (1 << (bits - 1))
    return (values * spread(scale.data[ids].float(), columns)).to(scale.dtype)


def stand_in():
    """Replace the kernels that CPUs lack."""
    compressed_tensors_embedding._dequant_gather_triton = rows
    modules = {name: sys.modules[f"{schemes.__name__}.compressed_tensors_{name}"] for name in (
        "w4a4_nvfp4", "w4a4_mxfp4", "w8a8_mxfp8", "w8a8_fp8", "w8a16_fp8",
    )}  # fmt: skip
    modules["w4a4_nvfp4"].init_nvfp4_linear_kernel = nvfp4
    modules["w4a4_mxfp4"].init_mxfp4_linear_kernel = mxfp4
    modules["w8a8_mxfp8"].init_mxfp8_linear_kernel = mxfp8
    modules["w8a8_fp8"].init_fp8_linear_kernel = fp8
    modules["w8a16_fp8"].init_wfp8_a16_linear_kernel = lambda **_: Plain(e4m3)
    kernel = grids.CPUWNA16LinearKernel
    own = kernel.can_implement, kernel.process_weights_after_loading, kernel.apply_weights

    def process(self, layer):
        return own[1](self, layer) if own[0](self.config)[0] else grid(self, layer)

    def apply(self, layer, x, bias=None):
        if own[0](self.config)[0]:
            return own[2](self, layer, x, bias)
        return torch.nn.functional.linear(x, layer.dense, bias)

    kernel.can_implement = staticmethod(lambda config: (True, None))
    kernel.process_weights_after_loading, kernel.apply_weights = process, apply


def answer(folder, prompts, new):
    """Greedy tokens after each prompt, and the log-probability of each token of the prompts and the answers."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=folder, dtype="bfloat16", enforce_eager=True, skip_tokenizer_init=True, max_model_len=128,
        enable_prefix_caching=False, max_num_seqs=4,
    )  # fmt: skip
    wanted = SamplingParams(
        temperature=0.0, max_tokens=new, logprobs=0, prompt_logprobs=0, detokenize=False, ignore_eos=True
    )
    found = engine.generate([{"prompt_token_ids": ids} for ids in prompts], wanted, use_tqdm=False)
    return [
        {
            "tokens": list(each.outputs[0].token_ids),
            "prompt": [next(iter(place.values())).logprob for place in each.prompt_logprobs[1:]],
            "answer": [next(iter(place.values())).logprob for place in each.outputs[0].logprobs],
        }
        for each in found
    ]


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        request = json.load(file)
    stand_in()
    answers = {}
    for name, folder in request["checkpoints"].items():
        try:
            answers[name] = answer(folder, request["prompts"], request["new"])
        except Exception as error:  # noqa: BLE001 - the test tells which checkpoint failed
            answers[name] = {"error": f"{type(error).__name__}: {error}"}
        with open(sys.argv[2], "w") as file:
            json.dump(answers, file)
