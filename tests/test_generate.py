"""`flux-megatron generate`: the tokens of stock, of one rank, of a model without a cache."""

from __future__ import annotations

import io
import json
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("megatron.core", reason="needs the extra `train`")

import torch
import torch.distributed as dist
from forked_processes import command_line, import_what_ranks_import, kept
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from ranks import on_cpu_ranks
from typer.testing import CliRunner

from flux_megatron import cli
from flux_megatron.integration.cpu_device import pretend_cuda
from flux_megatron.lab.generate import comparison, decoder, job
from flux_megatron.lab.generate import launcher as generate_launcher
from flux_megatron.lab.generate.comparison import Decoded
from flux_megatron.lab.generate.request import Request
from flux_megatron.lab.generate.sampling import Sampler
from flux_megatron.lab.generate.text_stream import TextStream
from flux_megatron.lab.train.config import TrainConfig
from flux_megatron.lab.train.model import gpt_model, transformer_config
from flux_megatron.lab.train.tokenizer import ByteTokenizer
from flux_megatron.overlap.report import report

LAYERS, TOKENS, STEPS = 2, 6, 3
MODEL = {"num_layers": LAYERS, "hidden": 32, "heads": 4, "ffn": 64, "seq_length": 32}
PROMPTS = ("12 is 144. 13 is", "7", "")
NO_PLANT = dict.fromkeys(range(8)).get


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that two ranks have trained, for all tests."""
    folder = tmp_path_factory.mktemp("trained")
    text = folder / "text"
    text.mkdir()
    (text / "words.txt").write_text(" ".join(f"{i} is {i * i}." for i in range(3000)))
    settings = {f"model.{key}": value for key, value in MODEL.items()} | {
        "layers": "stock", "parallel.device": "cpu", "train.warmup_steps": 1, "train.lr": 1e-2,
        "train.save_every": "null",
    }  # fmt: skip
    pairs = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    line = ["train", "--config", "configs/train/demo.yaml", "--data", str(text), "--steps", "30"]
    flux_megatron(folder, *line, "--out", str(folder / "run"), *pairs)
    return folder / "run"


def flux_megatron(folder: Path, *words: str, plant=NO_PLANT, expected: int = 0) -> str:
    """The output of a command, whose processes are forks of this one and leave none behind."""
    import_what_ranks_import()
    code, output, left = kept(command_line, [*words], plant, folder / "output")
    assert (code, left) == (expected, []), output
    return output


def generate(
    folder: Path, trained: Path, *words: str, plant=NO_PLANT, expected: int = 0, prompts=PROMPTS
):
    """Output and result of decoding the prompts."""
    (folder / "prompts").write_text("\n".join(prompts) + "\n")
    line = ["generate", "--checkpoint", str(trained), "--prompts", str(folder / "prompts")]
    line += ["--tokens", str(TOKENS), "--json", str(folder / "result.json"), "--device", "cpu"]
    output = flux_megatron(folder, *line, *words, plant=plant, expected=expected)
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
    ByteTokenizer.eod = property(lambda self: ord(" "))


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
        return (-y if type(self) is FluxRowParallelLinear else y), bias

    FluxRowParallelLinear.forward = wrong


def test_other_tokens_fail_the_comparison(trained, tmp_path):
    words = ("--compare", "--tokens", "3")
    output, result = generate(tmp_path, trained, *words, plant=with_the_wrong_sign, expected=1)
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


def noting(order: list, name: str, function):
    return lambda *given: (order.append(name), function(*given))[1]


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
    sampler = Sampler(len(prompts), vocab, 0.0, 0, 1, cpu)
    decoding = decoder.Decoder(
        module, sampler, rows=len(prompts), slots=30, vocab=vocab, device=cpu
    )
    texts, steps, order = [[*prompt] for prompt in prompts], [], []
    for owner, name in ((sampler, "draw"), (decoding, "_forward")):
        setattr(owner, name, noting(order, name, getattr(owner, name)))
    for number in range(STEPS):
        decoding.step() if number else decoding.prefill(prompts, multiple=tp)
        steps.append(decoding.logits.clone())
        for text, token in zip(texts, decoding.token.tolist(), strict=True):
            text.append(token)
    assert order == ["draw", "_forward"] * STEPS  # each token has noise of its own
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


# what needs no ranks


class Seen(Exception):
    pass


def seen(*given):
    raise Seen(*given)


def test_a_request_reaches_the_sampler_and_every_token_is_confirmed(monkeypatch):
    """Before a token is shown, a wait that ran out of time is an error."""
    cpu = torch.device("cpu")
    asked = Request(
        checkpoint=Path("none"), prompts=("12", "7"), tokens=3, temperature=0.5, top_k=4, seed=7,
        arms=("flux",), graph=False,
    )  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(job, "Sampler", seen)
        with pytest.raises(Seen) as sampler:
            job.decode(config(1), asked, None, cpu)
    assert sampler.value.args == (2, ByteTokenizer().vocab_size, 0.5, 4, 7, cpu)
    for name in ("_model", "load_weights"):
        monkeypatch.setattr(job, name, lambda *_: None)
    monkeypatch.setattr(job, "Decoder", mock.MagicMock())
    monkeypatch.setattr(job, "synchronize", seen)
    with pytest.raises(Seen):
        job.decode(config(1), asked, None, cpu)


def test_a_seed_draws_the_same_and_by_the_distribution():
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0]).repeat(20000, 1)
    drawn = []
    for _ in range(2):
        sampler = Sampler(20000, 4, 0.5, 3, 7, torch.device("cpu"))
        sampler.draw()
        drawn.append(sampler.scores(logits).argmax(-1))
    assert torch.equal(*drawn)
    sampler.draw()
    assert not torch.equal(sampler.scores(logits).argmax(-1), drawn[0])
    shares = torch.bincount(drawn[0], minlength=4) / 20000
    expected = torch.softmax(torch.tensor([-torch.inf, 2.0, 4.0, 6.0]), 0)
    assert (shares - expected).abs().max() < 0.01


def test_text_comes_whole_and_in_order():
    out = io.StringIO()
    stream = TextStream(("a", "b"), out)
    for token in "é\x1b".encode():
        stream.add(0, token)
        stream.add(1, 0x21)
    assert out.getvalue() == "== prompt 1\naé\ufffd"
    stream.end(1)
    stream.add(0, 0xC3)  # half a character
    stream.end(0)
    assert out.getvalue() == "== prompt 1\naé\ufffd\ufffd\n== prompt 2\nb!!!\n"


def test_the_first_difference_of_each_prompt_is_found():
    same, ours = torch.tensor([0.0, 3.0, 2.0]), torch.tensor([0.0, 1.0, 1.5])
    stock = torch.tensor([0.0, 1.25, 1.0])
    a = Decoded([[1, 2, 9], [1, 1]], *[[torch.stack([same, same]), torch.stack([ours, same])]] * 2)
    b = Decoded([[1, 1, 9], [1, 1]], *[[torch.stack([same, same]), torch.stack([stock, same])]] * 2)
    (found,) = comparison.differences(a, b)
    assert found == {
        "prompt": 1, "token": 2, "flux": 2, "stock": 1, "gap_flux": 0.5, "gap_stock": 0.25,
    }  # fmt: skip
    assert comparison.largest_logit_difference(a, b) == 0.5
    assert comparison.differences(a, a) == []


BAD = {
    "no run": (["--checkpoint", "{tmp}"], ["{tmp} given", "config.json"]),
    "no such step": (["--checkpoint", "{run}/checkpoints/step_7"], ["step_7 given", "step_N"]),
    "too long": (["--tokens", "30"], ["prompt 1 of 6 tokens and --tokens 30 given", "32 together"]),
    "no tokens": (["--tokens", "0"], ["--tokens 0 given", "1 or more expected"]),
    "heads": (["--tp", "3"], ["--tp 3 given", "model.heads=4 must be divisible"]),
    "no ranks": (["--tp", "0"], ["--tp 0 given", "greater than 0"]),
    "temperature": (["--temperature", "-1"], ["--temperature -1 given", "0 or more"]),
    "cold top-k": (["--top-k", "4"], ["--top-k 4 given", "--temperature above 0"]),
    "top-k": (["--top-k", "258", "--temperature", "1"], ["--top-k 258 given", "0 to 257"]),
    "layers": (["--layers", "mine"], ["--layers mine given", "flux or stock"]),
    "two prompts": (["--prompts", "{tmp}"], ["one of --prompt and --prompts"]),
    "no text": (["--prompt", "a\udcff"], ["prompt 1 is no text", "position 1"]),
    "GPUs": (["--tokens", "8", "--device", "cuda"], ["device=cuda: 2 ranks need as many GPUs"]),
}


def refused(*words: str) -> str:
    done = CliRunner().invoke(cli.app, ["generate", *words])
    assert done.exit_code == 2, done.output
    assert done.stderr.count("\n") == 1
    return done.stderr


@pytest.fixture
def no_ranks(monkeypatch):
    monkeypatch.setattr(generate_launcher.launcher, "run_ranks", lambda *_: pytest.fail("ranks"))
    monkeypatch.setattr(generate_launcher.launcher, "gpu_count", lambda: 0)


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_decoded_is_refused_before_any_rank(case, trained, tmp_path, no_ranks):
    words, expected = BAD[case]
    places = {"run": trained, "tmp": tmp_path}
    line = ["--checkpoint", "{run}", "--prompt", "12 is ", *words]
    message = refused(*(word.format(**places) for word in line))
    assert all(part.format(**places) in message for part in expected), message


def test_bad_files_are_named(trained, tmp_path, no_ranks):
    many = tmp_path / "many"
    for content, expected in [
        ("a\n" * 65, "65 prompts given, 1 to 64 expected"),
        ("", "0 prompts given"),
        (b"\xff", "--prompts"),
    ]:
        many.write_bytes(content.encode() if isinstance(content, str) else content)
        assert expected in refused("--checkpoint", str(trained), "--prompts", str(many))
