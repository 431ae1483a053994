"""Patterns of layers with near attention (a window) and far (full) attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from layerkit.config import Config
from layerkit.interop.hugging_face.keys import ConfigFile, Entry, all_layers
from layerkit.layers.transformer.stacks import StackedTransformerRepeated

T = TypeVar("T")

NEAR, FAR = "sliding_attention", "full_attention"


def alternate(period: int, *, key: str | None = None) -> Callable[[ConfigFile, int], str]:
    """Return the function by which every `period`-th layer is far, for `layer_types`.

    Args:
      period: Period of Transformers, also if the key is left out.
      key: Key of the period; None if there is none.
    """

    def kind(file: ConfigFile, layer: int) -> str:
        return NEAR if (layer + 1) % (period if key is None else file.get(key, period)) else FAR

    return kind


def layer_types(
    by_default: Callable[[ConfigFile, int], str],
    *,
    default_window: int | None,
    window: str = "sliding_window",
    to_ours: Callable[[int], int] = lambda window: window,
    to_theirs: Callable[[int], int] = lambda window: window,
    has_switch: bool = False,
    make_near: Callable[[ConfigFile, Config], None] = lambda file, template: None,
    write_more: Callable[[Config | None, Config | None], dict[str, Any]] = lambda near, far: {},
) -> Entry:
    """Return the entry of `layer_types` and the window, to be read after those of layers.

    Args:
      by_default: Function (file, layer) → type that Transformers applies if types are not listed.
      default_window: Window of Transformers if the key is left out.
      window: Key of the window.
      to_ours: Function from a value of the key to a window of the attention.
      to_theirs: Inverse of `to_ours`.
      has_switch: Near layers require `use_sliding_window` (Qwen).
      make_near: Function (file, template) that sets further fields of a near layer's template.
      write_more: Function from the near and far templates to further keys.
    """

    def read(file: ConfigFile, network: Config) -> None:
        layers = range(network.num_layers)
        types = [by_default(file, layer) for layer in layers]
        listed = file.get("layer_types", None)
        types = types if listed is None else listed
        is_list = isinstance(types, (list, tuple))
        if not is_list or [kind in (NEAR, FAR) for kind in types] != [True] * len(layers):
            raise file.invalid("layer_types", f"{NEAR!r} or {FAR!r} for each layer")
        is_on = not has_switch or file.get("use_sliding_window", default=False)
        size = file.get(window, default_window)
        if NEAR in types and (size is None or not is_on):
            if not has_switch:
                raise file.invalid(window, f"a window, since layer_types has {NEAR!r}")
            types = [FAR for _ in layers]
        templates = {FAR: network.stack_tpl.layer_tpl}
        if NEAR in types:
            templates[NEAR] = near = network.stack_tpl.layer_tpl.clone()
            near.attention_tpl.window = to_ours(size)
            make_near(file, near)
        network.stack_tpl = stack_layers([templates[kind] for kind in types])

    def write(network: Config) -> dict[str, Any]:
        layers = all_layers(network)
        near = [template for template in layers if template.attention_tpl.window is not None]
        far = [template for template in layers if template.attention_tpl.window is None]
        types = [FAR if layer.attention_tpl.window is None else NEAR for layer in layers]
        content: dict[str, Any] = {"layer_types": types}
        if near:  # Gemma of Transformers loads no null.
            content[window] = to_theirs(near[0].attention_tpl.window)
        if has_switch:
            content["use_sliding_window"] = bool(near)
            # Read by versions that ignore `layer_types`; their near layers come last.
            content["max_window_layers"] = types.index(NEAR) if near else len(types)
        return content | write_more(next(iter(near), None), next(iter(far), None))

    return Entry(read, write)


def stack_layers(layers: Sequence[Config], *, num_first: int = 0) -> Config:
    """Return the stack of layers, which repeats the fewest templates that give them.

    Leading layers, such as the dense ones of DeepSeek V3, may come before the pattern, at least
    `num_first` of them.
    """
    kinds = [layers.index(layer) for layer in layers]

    def period(first: int) -> int:
        rest = kinds[first:]
        return next(n for n in range(1, len(rest) + 1) if rest[n:] == rest[:-n])

    _, first = min((first + period(first), first) for first in range(num_first, len(kinds)))
    # Layers of one config would share their weights.
    templates = tuple(layer.clone() for layer in layers[: first + period(first)])
    stack: Config = StackedTransformerRepeated.HParams.config(first_tpls=templates[:first] or None)
    pattern = templates[first:]
    stack.set(**({"layer_tpl": pattern[0]} if len(pattern) == 1 else {"block_tpls": pattern}))
    return stack
