"""`flux-megatron generate`: the tokens of stock, of one rank, of a model without a cache."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from forked_command import flux_megatron
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from ranks import on_cpu_ranks
from train_words import words

from flux_megatron.lab.cpu import pretend_cuda
from flux_megatron.lab.generate import decode
from flux_megatron.lab.generate.request import Request
from flux_megatron.lab.train.config import TrainConfig
from flux_megatron.lab.train.model import gpt_model, transformer_config
from flux_megatron.lab.train.text import ByteTokenizer
from flux_megatron.overlap.report import report

LAYERS, TOKENS, STEPS = 2, 6, 3
MODEL = {"num_layers": LAYERS, "hidden": 32, "heads": 4, "ffn": 64, "seq_length": 32}
PROMPTS = ("12 is 144. 13 is", "7", "")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that two ranks have trained, for all tests."""
    folder = tmp_path_factory.mktemp("trained")
    settings = {f"model.{key}": value for key, value in MODEL.items()} | {"train.lr": 1e-2}
    given = words(folder / "run", folder / "text", "--steps", 30, layers="stock", **settings)
    flux_megatron(folder, *given)
    return folder / "run"


def generate(folder: Path, trained: Path, *more: str, prompts=PROMPTS, **options):
    """Output and result of decoding the prompts."""
    line = ["generate", "--checkpoint", trained, "--tokens", TOKENS]
    line += [word for prompt in prompts for word in ("--prompt", prompt)]
    output = flux_megatron(folder, *line, "--json", folder / "result.json", *more, **options)
    return output, json.loads((folder / "result.json").read_text())


@pytest.fixture(scope="module")
def compared(trained, tmp_path_factory):
    return generate(tmp_path_factory.mktemp("compared"), trained, "--compare")


def test_two_ranks_decode_what_stock_does_and_every_call_is_low_latency(compared):
    output, result = compared
    flux, stock = result["arms"]["flux"], result["arms"]["stock"]
    assert flux["tokens"] == stock["tokens"]
    assert [len(tokens) for tokens in flux["tokens"]] == [TOKENS] * 3
    calls = 2 * LAYERS * TOKENS * 2  # of two ranks
    assert flux["calls"] == {"gemm_ar low_latency": calls}
    assert (flux["eligible"], flux["silent"], flux["fallbacks"]) == (calls, 0, {})
    assert stock["calls"] == {}
    assert result["passed"]
    assert "tokens: same" in output
    for prompt, text in zip(PROMPTS, flux["texts"], strict=True):
        assert prompt + text in output


def test_a_prompt_of_odd_length_is_divided_over_the_ranks(trained, tmp_path):
    """Its 3 rows of 23 tokens are too many for `low_latency`."""
    prompts = ("12 is 144. 13 is 169. 1", "7", "")
    _, result = generate(tmp_path, trained, "--compare", "--tokens", "2", prompts=prompts)
    flux = result["arms"]["flux"]
    assert flux["tokens"] == result["arms"]["stock"]["tokens"]
    calls = 2 * LAYERS * 2  # of two ranks, for each token
    assert flux["calls"] == {"gemm_ar fused": calls, "gemm_ar low_latency": calls}
    assert flux["fallbacks"] == {}


def ends_at_spaces(rank: int) -> None:
    """Make the model's spaces ends of documents."""
    ByteTokenizer.eod = ord(" ")


def test_one_rank_reads_the_weights_of_two_and_a_text_ends_with_its_document(
    compared, trained, tmp_path
):
    _, result = generate(tmp_path, trained, "--tp", "1", plant=ends_at_spaces)
    whole = compared[1]["arms"]["flux"]["tokens"][:2]  # the last prompt is an end of document
    cut = [one[: one.index(32) + 1] if 32 in one else one for one in whole]
    assert cut != whole
    assert result["arms"]["flux"]["tokens"][:2] == cut
    assert result["arms"]["flux"]["calls"] == {}


def with_the_wrong_sign(rank: int) -> None:
    from flux_megatron.integration.layers import FluxRowParallelLinear

    forward = FluxRowParallelLinear.forward

    def wrong(self, *arguments):
        y, bias = forward(self, *arguments)
        return -y, bias

    FluxRowParallelLinear.forward = wrong


def test_other_tokens_fail_the_comparison(trained, tmp_path):
    more = ("--compare", "--tokens", "3")
    output, result = generate(tmp_path, trained, *more, plant=with_the_wrong_sign, expected=1)
    assert "tokens: DIFFERENT" in output
    first = result["differences"][0]
    assert first["flux"] != first["stock"]
    assert result["largest_logit_difference"] > 1e-2
    assert not result["passed"]


# one process a rank, without a command


def config(tp: int, **model: object) -> TrainConfig:
    sections = {"model": MODEL | model, "parallel": {"tp": tp, "sequence_parallel": False}}
    loop = {"steps": 1, "micro_batch": 1, "global_batch": 1, "lr": 1.0}
    return TrainConfig.model_validate(sections | {"train": loop})


@pytest.mark.parametrize(
    "model", [{}, {"position_embedding": "learned_absolute", "bias": True}], ids=["rope", "learned"]
)
@on_cpu_ranks(2)
def test_the_cache_changes_nothing(rank, model):
    """Logits after each decoded token, [steps, rows, vocab], are those of the same model that reads
    each whole text, one at a time, on stock code.
    """
    from flux_megatron.integration import arm

    tp = dist.get_world_size()
    pretend_cuda()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    torch.manual_seed(3)
    wanted, tokenizer, cpu = config(tp, **model), ByteTokenizer(), torch.device("cpu")
    vocab = tokenizer.vocab_size
    core_config = transformer_config(wanted)
    core_config.init_method = torch.nn.init.normal_  # so that logits depend on what came before
    module = gpt_model(wanted, core_config).eval()
    reference = [layer.self_attention.core_attention for layer in module.decoder.layers]
    prompts = [tokenizer.tokenize(prompt) or [tokenizer.eod] for prompt in PROMPTS]
    decoding = decode.Decoder(module, rows=len(prompts), slots=30, vocab=vocab, device=cpu)
    texts, steps = [[*prompt] for prompt in prompts], []
    for number in range(STEPS):
        decoding.step() if number else decoding.prefill(prompts, multiple=tp)
        steps.append(decoding.logits.clone())
        for text, token in zip(texts, decoding.token.tolist(), strict=True):
            text.append(token)
    calls = report().calls
    for layer, attention in zip(module.decoder.layers, reference, strict=True):
        layer.self_attention.core_attention = attention
    whole = torch.zeros(STEPS, len(prompts), vocab)
    with torch.no_grad(), arm.use(stock=True):
        for row, text in enumerate(texts):
            logits = module(torch.tensor([text]), torch.arange(len(text))[None], None)
            logits = gather_from_tensor_model_parallel_region(logits)[0, len(prompts[row]) - 1 : -1]
            whole[:, row] = logits[:, :vocab]
    scale = whole.std()
    assert (torch.stack(steps) - whole).abs().max() < 1e-4 * scale
    assert (whole[0] - whole[1]).abs().max() > scale  # it depends on the texts
    assert calls == {("gemm_ar", "low_latency"): 2 * LAYERS * STEPS}


def test_every_token_is_confirmed(monkeypatch):
    """Before a token is kept, a wait that ran out of time is an error."""
    for name in ("gpt_model", "load_weights", "Decoder"):
        monkeypatch.setattr(decode, name, mock.MagicMock())
    monkeypatch.setattr(decode, "synchronize", mock.Mock(side_effect=TimeoutError))
    with pytest.raises(TimeoutError):
        decode.decode_arm(config(1), Request(Path("none"), ["1"], 3), torch.device("cpu"))


def test_the_first_difference_of_each_prompt_is_found():
    same, ours = torch.tensor([0.0, 3.0, 2.0]), torch.tensor([0.0, 1.0, 1.5])
    stock = torch.tensor([0.0, 1.25, 1.0])
    a = [[1, 2, 9], [1, 1]], [torch.stack([same, same]), torch.stack([ours, same])]
    b = [[1, 1, 9], [1, 1]], [torch.stack([same, same]), torch.stack([stock, same])]
    found, largest = decode.differences(a[0], b[0], a[1], b[1])
    assert found == [{"prompt": 1, "token": 2, "flux": 2, "stock": 1}]
    assert largest == 0.5
    assert decode.differences(a[0], a[0], a[1], a[1]) == ([], 0.0)
