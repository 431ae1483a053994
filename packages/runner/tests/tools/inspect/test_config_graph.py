from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from layerkit.config import Config, target_of, walk_configs
from layerkit.layers import StackedTransformer, StackedTransformerRepeated, Transformer
from layerkit.models import LanguageModel, TransformerLm
from layerkit_runner import BaseExperiment
from layerkit_runner.config.resolve import resolve
from layerkit_runner.tools.inspect.config_graph import ConfigGraph, config_graph, mermaid

_BOX = re.compile(r'  (\w+)(?:\["[^"]*"\]|\(\["[^"]*"\]\))')
_ARROW = re.compile(r'  (\w+) -->\|"[^"]*"\| (\w+)')


@pytest.fixture(scope="module")
def experiment(tiny: SimpleNamespace) -> type[BaseExperiment]:
    class Small(BaseExperiment):
        """An experiment with a repeated stack, or with a pattern of layers."""

        PATTERN: bool = False
        NAME: str = 'a "b" <c> #d'

        def task(self) -> Config:
            stack = StackedTransformerRepeated.HParams.config()
            if self.PATTERN:
                local, whole = Transformer.HParams.config(), Transformer.HParams.config()
                local.attention_tpl.window = 4
                blocks = (local, local.clone(), whole)
                stack = StackedTransformer.HParams.config(block_tpls=blocks)
            lm = TransformerLm.HParams.config(vocab_size=32, num_layers=7, stack_tpl=stack)
            config = tiny.task_config()
            return config.set(name=self.NAME, model=LanguageModel.HParams.config(lm_tpl=lm))

        def datasets(self) -> list[Config]:
            return [tiny.Points.HParams.config(is_training=True)]

    return Small


def arrows_from(graph: ConfigGraph, title: str) -> set[tuple[str, ...]]:
    keys = {node.key for node in graph.nodes if node.title == title}
    return {edge.fields for edge in graph.edges if edge.parent in keys}


def test_equal_templates_share_a_box(experiment: Any):
    graph = config_graph(resolve(experiment()))
    assert ("layer_tpl",) in arrows_from(graph, "StackedTransformerRepeated")
    fields = arrows_from(graph, "MultiHeadAttention")
    assert {("key_tpl", "value_tpl"), ("query_tpl",)} <= fields
    assert len(graph.nodes) < 80


def test_pattern_of_layers(experiment: Any):
    fields = arrows_from(config_graph(resolve(experiment(PATTERN=True))), "StackedTransformer")
    assert ("block_tpls.0", "block_tpls.1") in fields
    # The third block is equal to the template that the pattern replaces.
    assert any("block_tpls.2" in names for names in fields)


def test_every_config_is_below_the_experiment(experiment: Any):
    resolved = resolve(experiment())
    graph = config_graph(resolved)
    parents = {edge.child: edge.parent for edge in graph.edges}
    for node in graph.nodes[1:]:
        above = node.key
        while above in parents:
            above = parents[above]
        assert above == "experiment"
    titles = {node.title for node in graph.nodes}
    for root in (resolved.task, resolved.datasets, resolved.partitioner):
        for config in walk_configs(root):
            assert target_of(config).__qualname__ in titles


def test_only_changed_values_are_shown(experiment: Any):
    graph = config_graph(resolve(experiment(PATTERN=True)))
    [lm] = [node for node in graph.nodes if node.title == "TransformerLm"]
    assert lm.values == ("vocab_size = 32", "num_layers = 7")
    assert graph.nodes[0].values == ("PATTERN = True",)


def test_a_shared_config_has_one_box(tiny: SimpleNamespace):
    class Shared(BaseExperiment):
        """An experiment with one config for two data sets."""

        def task(self) -> Config:
            return tiny.task_config()

        def datasets(self) -> list[Config]:
            points = tiny.Points.HParams.config(is_training=True)
            return [points, points]

        def decode_datasets(self) -> list[Config]:
            return [tiny.Prompts.HParams.config()]

    graph = config_graph(resolve(Shared()))
    assert [node.title for node in graph.nodes].count(tiny.Points.__qualname__) == 1
    text = mermaid(graph)
    assert '"datasets.0, datasets.1"' in text


def test_mermaid(experiment: Any):
    lines = mermaid(config_graph(resolve(experiment()))).splitlines()
    assert lines[0] == "flowchart TD"
    boxes = [match[1] for line in lines if (match := _BOX.fullmatch(line))]
    arrows = [match.groups() for line in lines if (match := _ARROW.fullmatch(line))]
    # Nothing but boxes and arrows below the heading and its comment, and no arrow to nowhere.
    assert len(boxes) + len(arrows) == len(lines) - 2
    assert len(set(boxes)) == len(boxes)
    assert {end for arrow in arrows for end in arrow} == set(boxes)
    assert "name = a #quot;b#quot; #lt;c#gt; #35;d" in "\n".join(lines)
    # Optimizers are functions.
    assert any('(["sgd' in line for line in lines)
