"""The views: which page shows which verbs, what it is asked when nothing is, and the question that it answers.

Not here: how a page looks (`pages`), and what the verbs do (`commands`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from meshwise.book import CHAPTERS, problems
from meshwise.costs.rules import RULES
from meshwise.hardware import chips
from meshwise.models import model_names
from meshwise.web.links import Pairs, options, parse_command, query


@dataclass(frozen=True, kw_only=True)
class View:
    """One page.

    Args:
        name: the page's path without the slash.
        title: in the navigation.
        question: above the answer.
        verb: that it shows.
        layout_verb: that it shows where a layout is given; "" for the same.
        example: a command, answered where nothing is asked.
        card: one line for the start page, with the question's subject.
        listed: whether it stands in the navigation.
    """

    name: str
    title: str
    question: str
    verb: str
    layout_verb: str = ""
    example: str
    card: str = ""
    listed: bool = True

    def verb_of(self, keys: Iterable[str]) -> str:
        """The verb that a link with these options asks."""
        return self.layout_verb if self.layout_verb and "layout" in keys else self.verb

    @property
    def verbs(self) -> tuple[str, ...]:
        """The verbs that it shows."""
        return (self.verb, self.layout_verb) if self.layout_verb else (self.verb,)

    def preset(self) -> Pairs:
        """The options of the example."""
        return parse_command(self.example)[1]


#: Views in the order of the navigation.
VIEWS: Mapping[str, View] = {
    view.name: view
    for view in (
        View(
            name="train",
            title="Train",
            question="How do I train this model on this cluster?",
            verb="plan train",
            layout_verb="estimate train",
            example="meshwise plan train llama-3-8b --on v5p:4x4x4 --batch-tokens 1Mi --seq-len 4096",
            card="Train LLaMA-3-8B on 64 TPU v5p",
        ),
        View(
            name="serve",
            title="Serve",
            question="How do I serve this model, and what does latency cost?",
            verb="plan serve",
            layout_verb="estimate serve",
            example="meshwise plan serve llama-3-70b --on h100:8 --prompt 1024 --output 256",
            card="Serve LLaMA-3-70B on 8 H100",
        ),
        View(
            name="roofline",
            title="Roofline",
            question="What binds this operation, and from which size on?",
            verb="roofline",
            example='meshwise roofline "bf16[B, D] * int8[D, F] -> bf16[B, F]" --on v5e --set B=64,D=8Ki,F=32Ki',
            card="Multiply by int8 weights on TPU v5e",
        ),
        View(
            name="shard",
            title="Shard",
            question="Which communication does this sharded product need?",
            verb="shard",
            example='meshwise shard "A[I_X, J] * B[J, K_Y] -> C[I_X, K]" --mesh X=4,Y=2 --set I=4Ki,J=8Ki,K=8Ki '
            "--on v5e:4x2",
            card="Multiply matrices that are split over 8 chips",
        ),
        View(
            name="model",
            title="Model",
            question="How large is this model, part by part?",
            verb="model",
            example="meshwise model llama-3-70b",
        ),
        View(
            name="fit",
            title="Fit",
            question="Does it fit, for serving and for training?",
            verb="fit",
            example="meshwise fit llama-3-8b --on h100:1",
        ),
        View(
            name="timeline",
            title="Timeline",
            question="What happens in one training step?",
            verb="simulate train",
            example="meshwise simulate train llama-3-8b --on h100:16 --batch-tokens 512Ki --seq-len 8192 "
            "--layout stage=4,data=4,schedule=1f1b,num_microbatches=16,micro_batch=1,remat=none",
        ),
        View(
            name="collective",
            listed=False,
            title="Collective",
            question="How long does this collective take?",
            verb="collective",
            example='meshwise collective all-gather "bf16[1024, 4096_X]" --mesh X=16 --on v5e:16x16',
        ),
        View(
            name="rule",
            title="Rules",
            question="What does a rule of the book say, solved for any of its letters?",
            verb="rule",
            example="meshwise rule",
        ),
        View(
            name="book",
            title="Book",
            question="What does the book ask, and is my answer right?",
            verb="book",
            example="meshwise book",
        ),
        View(
            name="models",
            listed=False,
            title="Models",
            question="Which models are known?",
            verb="models",
            example="meshwise models",
        ),
        View(
            name="chips",
            listed=False,
            title="Chips",
            question="Which chips are known?",
            verb="chips",
            example="meshwise chips",
        ),
        View(
            name="clusters",
            listed=False,
            title="Clusters",
            question="How are clusters named, and what does a name stand for?",
            verb="clusters",
            example="meshwise clusters",
        ),
    )
}

#: Verb -> the view that shows it.
VIEW_OF: Mapping[str, View] = {verb: view for view in VIEWS.values() for verb in view.verbs}

#: The pair with which a problem's answer is not shown.
HINT = ("hint", "yes")

#: Views of the start page's cards.
CARDS = ("train", "serve", "roofline", "shard")

#: Comparisons to begin with: words, A, and what B has in place of A's options.
COMPARED = (
    (
        "FSDP against tensor parallelism for LLaMA-3-8B on 8 H100",
        "meshwise estimate train llama-3-8b --on h100:8 --batch-tokens 1Mi --seq-len 4096 --layout fsdp=8 --no-changes",
        "tensor=8",
    ),
    (
        "LLaMA-3-70B served by 8 H100 or 8 H200",
        "meshwise plan serve llama-3-70b --on h100:8 --prompt 1024 --output 256",
        "--on h200:8",
    ),
    (
        "one product on TPU v5e and TPU v6e",
        'meshwise roofline "bf16[B, D] * bf16[D, F] -> bf16[B, F]" --on v5e --set B=128,D=8Ki,F=32Ki',
        "--on v6e",
    ),
)


def link(verb: str, pairs: Pairs) -> str:
    """The link that shows a verb with these options.

    >>> link("estimate train", (("model", "llama-3-8b"), ("on", "v5e:4x8"), ("layout", "fsdp=32")))
    '/train?model=llama-3-8b&on=v5e:4x8&layout=fsdp=32'
    """
    return f"/{VIEW_OF[verb].name}" + (f"?{query(pairs)}" if pairs else "")


@cache
def named(verb: str, *, hint: bool = False) -> Mapping[str, str]:
    """What a verb's tables name in their first column -> the link that shows it; questions with a hint stay so."""
    match verb:
        case "book":
            known = (*CHAPTERS, *(p.id.rsplit(".", 1)[0] for p in problems().values()), *problems())
            return {name: link(verb, (("problem", name), *((HINT,) if hint else ()))) for name in known}
        case "rule":
            return {name: link(verb, (("name", name),)) for name in RULES}
        case "models":
            return {name: link("model", (("model", name),)) for name in model_names()}
        case "chips":
            return {name: link(verb, (("chip", name),)) for name in chips()}
        case _:
            return {}


def changed(verb: str, pairs: Pairs, **changes: str | None) -> Pairs:
    """The options with others in their place; None takes one away.

    Args:
        verb: whose options.
        pairs: before.
        changes: key, with _ for -, -> text.
    """
    new = {key.replace("_", "-"): text for key, text in changes.items()}
    kept = [(key, text) for key, text in pairs if key not in new]
    order = list(options(verb))
    found = [*kept, *((key, text) for key, text in new.items() if text is not None)]
    return tuple(sorted(found, key=lambda pair: order.index(pair[0])))
