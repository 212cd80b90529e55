"""What a judged program's Python processes start with: on PYTHONPATH for `tests.judges.labs`, never for anything else.

LABS_LOSSES=folder     the loss of every `backward()` is written there, a file a process: "rank loss" a line
LABS_REFERENCE=N       PyTorch is told that N GPUs are there, and all of them are this CPU (on_cpu.py)

Python's, NumPy's and PyTorch's generators are seeded, for programs that do not. Torchvision takes data of our making for its own, transformers makes the weights that the hub would have.
"""

import os
import sys


class _After:
    """Calls a function with a module when that has been imported."""

    def __init__(self, wanted):
        self._wanted = wanted

    def find_spec(self, name, path=None, target=None):
        then = self._wanted.pop(name, None)  # others that ask all finders, as virtualgpu's does, are not answered
        if then is None:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self or not hasattr(finder, "find_spec") else finder.find_spec(name, path, target)
            if spec is not None:
                execute = spec.loader.exec_module

                def exec_module(module, execute=execute):
                    execute(module)
                    then(module)

                spec.loader.exec_module = exec_module
                return spec
        return None


def _torch(torch):
    import random

    random.seed(0)
    torch.manual_seed(int(os.environ.get("RANK", "0")))
    if os.environ.get("LABS_REFERENCE"):
        import on_cpu

        on_cpu.start(int(os.environ["LABS_REFERENCE"]))
    if os.environ.get("LABS_LOSSES"):
        _write_losses(torch, os.environ["LABS_LOSSES"])


def _numpy(numpy):
    numpy.random.seed(0)


def _write_losses(torch, folder):
    backward = torch.autograd.backward

    def written(tensors, *arguments, **options):
        given = arguments[0] if arguments else options.get("grad_tensors")
        first = tensors if isinstance(tensors, torch.Tensor) else tensors[0]
        whole = (
            given is None or all(each is None for each in given) if isinstance(given, tuple | list | None) else False
        )
        if whole and first.numel() == 1:
            ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
            loss = float(getattr(first, "_local_tensor", first).detach())
            with open(os.path.join(folder, str(os.getpid())), "a") as out:
                out.write(f"{torch.distributed.get_rank() if ranks else 0} {loss!r}\n")
        return backward(tensors, *arguments, **options)

    torch.autograd.backward = written


def _cifar(module):
    module.check_integrity = lambda path, md5=None: os.path.isfile(path)


def _transformers(module):
    """A model of the hub is a model of its configuration, with the weights it begins with."""

    def from_pretrained(cls, name, *arguments, config=None, dtype=None, torch_dtype=None, **options):
        options = {key: options[key] for key in ("attn_implementation",) if key in options}
        return cls._from_config(config or cls.config_class.from_pretrained(name), dtype=dtype or torch_dtype, **options)

    module.PreTrainedModel.from_pretrained = classmethod(from_pretrained)


class _Theta:
    """transformers 4 had it in a Llama's configuration itself."""

    def __get__(self, config, kind=None):
        parameters = {} if config is None else config.__dict__.get("rope_parameters") or {}
        if "rope_theta" not in parameters:
            raise AttributeError("rope_theta")
        return parameters["rope_theta"]


def _llama_configuration(module):
    module.LlamaConfig.rope_theta = _Theta()


def _tokenizers(module):
    """transformers 4's name for calling a tokenizer with several texts."""
    base = module.PreTrainedTokenizerBase
    if not hasattr(base, "batch_encode_plus"):
        base.batch_encode_plus = lambda self, texts, **options: self(texts, **options)


_WANTED = {
    "torch": _torch,
    "numpy": _numpy,
    "torchvision.datasets.cifar": _cifar,
    "transformers.modeling_utils": _transformers,
    "transformers.models.llama.configuration_llama": _llama_configuration,
    "transformers.tokenization_utils_base": _tokenizers,
}
sys.meta_path.insert(0, _After(_WANTED))
