"""Makes the stock `lm_eval --model refusion` find this project's model.

lm-eval up to 0.4.13 reads no entry points. `refusion_eval_autoload.pth` (or `.start` from Python 3.15) calls
`install` at interpreter start; it costs well under a millisecond and imports nothing. When, and only when, the process
imports lm-eval's model registry, the name "refusion" is added to it as a lazy string.
"""

import sys

REGISTRY = "lm_eval.api.registry"
MODELS = {"refusion": "refusion_eval.lm_eval_plugin.adapter:RefusionLM"}


def _register(registry):
    # Somebody else's evaluation must run on whatever goes wrong here, hence the broad except.
    try:
        # lm-eval lists its own models only while the registry is empty, so they have to be there first.
        __import__("lm_eval.models")
        for name, target in MODELS.items():
            if name not in registry.model_registry:
                registry.model_registry.register(name, target=target)
    except Exception as error:  # noqa: BLE001
        print(f"refusion_eval: cannot add its models to lm_eval ({error!r})", file=sys.stderr)


class RegistryFinder:
    """Finds one module, lm-eval's registry, by the other finders, and adds our names once it has run."""

    def find_spec(self, name, path=None, target=None):
        if name != REGISTRY:
            return None
        finders = (finder.find_spec for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next((spec for find in finders if (spec := find(name, path, target)) is not None), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (run(module), _register(module))
        return spec


def install():
    """Puts the finder in front, once; a registry that is already loaded gets the names at once."""
    if REGISTRY in sys.modules:
        _register(sys.modules[REGISTRY])
    elif not any(isinstance(finder, RegistryFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, RegistryFinder())
