"""generate() of a Hugging Face model before and after `gemmpipe.patch`: what was patched, and how outputs compare.

    python examples/hf_generate.py --folder /tmp/hf

A small Qwen3 with random weights is built from a configuration (nothing is downloaded); `--config DIR` takes a model's
own config.json, with random weights too. The products of its `generate` are captured and tuned, and it runs again with
the tuned ones: eager, as `generate` runs. Needs the extra `hf`; runs on a CPU too.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import torch
import transformers

import gemmpipe
from gemmpipe.runtime import dispatch_report

SMALL = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
"""The configuration of the model without `--config`."""
TABLE = "bf16_tuned_gemm.csv"
_SEED = 7
_MAX_DIFFERENCE = 0.1  # of the logits' spread: another summation order flips last bits of bf16


def build(args: argparse.Namespace) -> transformers.PreTrainedModel:
    """The model with random weights, the same in every process."""
    fields = json.loads((Path(args.config) / "config.json").read_text()) if args.config else SMALL
    fields = {name: value for name, value in fields.items() if name != "quantization_config"}
    config = transformers.AutoConfig.for_model(**fields)
    torch.manual_seed(_SEED)
    with torch.device(args.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def prompt(model: transformers.PreTrainedModel, args: argparse.Namespace) -> torch.Tensor:
    """Token ids [batch, tokens]."""
    generator = torch.Generator().manual_seed(_SEED)
    shape = (args.batch, args.tokens)
    return torch.randint(model.config.get_text_config().vocab_size, shape, generator=generator).to(args.device)


@torch.inference_mode()
def generate(model: transformers.PreTrainedModel, args: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """(new tokens [batch, new], the logits from which each was chosen [new, batch, vocabulary])."""
    ids = prompt(model, args)
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=args.new,
        min_new_tokens=args.new,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    return found.sequences[:, ids.shape[1] :], torch.stack(found.logits).float()


def compare(args: argparse.Namespace) -> None:
    """Generate before and after `patch` and print how both differ. Raises AssertionError if they disagree."""
    model = build(args)
    before, wanted = generate(model, args)
    with gemmpipe.patch(model) as patched:
        print(patched)
        for name in list(patched.layers)[:4]:
            print(f"  {name}")
        after, logits = generate(model, args)
    again, _ = generate(model, args)
    assert torch.equal(before, again), "undone at the end of the block"
    counts = Counter(dispatch_report().values())
    print("dispatch steps by key:", dict(counts))
    # Logits are comparable up to the first token in which the two differ.
    same = int((before == after).cumprod(1).sum(1).min())
    upto = min(same + 1, args.new)
    difference = float(((logits - wanted)[:upto].square().mean(-1).sqrt() / wanted[:upto].std(-1)).max())
    print(f"generate: {same} of {args.new} new tokens are the same in all {args.batch} sequences")
    print(f"logits up to there differ by at most {difference:.2%} of their spread")
    assert patched.replaced > 0, "no layer has a tuned row"
    assert counts["exact"] + counts["padded"] > 0, "no product was tuned"
    assert difference < _MAX_DIFFERENCE, f"logits differ by {difference:.1%} of their spread"


def flow(args: argparse.Namespace) -> None:
    """Capture, tune and compare, each in its own process."""
    folder = Path(args.folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    captured = folder / "captured.csv"
    captured.unlink(missing_ok=True)
    again = [*sys.argv[1:], "--folder", str(folder)]
    environment = {**os.environ, "GEMMPIPE_CAPTURE": str(captured)}
    _run([sys.executable, "-m", "gemmpipe.capture", __file__, *again, "--only", "generate"], folder, environment)
    shapes = ["kernel=a16w16", "shapes=csv", f"shapes.path={captured.name}"]
    options = ["format=[csv]", "output=tuned", f"device={args.device}"]
    _run([sys.executable, "-m", "gemmpipe", *args.pipeline.split(), *shapes, *options], folder, None)
    environment = {**os.environ, "GEMMPIPE_CONFIG_A16W16": str(folder / "tuned" / TABLE)}
    _run([sys.executable, __file__, *again, "--only", "compare"], folder, environment)


def _run(command: list[str], folder: Path, environment: dict[str, str] | None) -> None:
    print("$", " ".join(command[1:]), flush=True)
    subprocess.run(command, cwd=folder, env=environment, check=True)


def main() -> None:
    """The whole flow, or one part of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", help="a folder with a model's config.json")
    parser.add_argument("--folder", default="hf_demo")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16, help="tokens of the prompt")
    parser.add_argument("--new", type=int, default=8, help="tokens to generate")
    parser.add_argument("--pipeline", default="quick", help="the pipeline, and further arguments of gemmpipe")
    parser.add_argument("--only", choices=("generate", "compare"), help="one part")
    args = parser.parse_args()
    if args.only == "generate":
        generate(build(args), args)
    elif args.only == "compare":
        compare(args)
    else:
        flow(args)


if __name__ == "__main__":
    main()
