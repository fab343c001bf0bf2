"""A link is a command and a command a link."""

import shlex
from urllib.parse import parse_qsl

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.cli import main
from meshwise.core.errors import MeshwiseError
from meshwise.web.links import VERBS, command, load, options, parse_command, query, read_pairs, requests_of
from meshwise.web.views import VIEW_OF, VIEWS, link

COMMANDS = [
    *(view.example for view in VIEWS.values()),
    "meshwise estimate train llama-3-8b --on h100:16 --batch-tokens 1Mi --seq-len 4096 --layout fsdp=16 --no-changes",
    "meshwise estimate serve llama-3-70b --on h100:8 --batch 64 --layout tensor=8 --prompt 1024 --output 256",
    "meshwise plan train llama-3-8b --on v5e:4x8 --batch-tokens 1Mi --seq-len 4096 --fix tensor=8 --fix stage=2",
    "meshwise book roofline.q2.Bcrit --set W_hbm=1.6e12 --answer 120",
    "meshwise roofline 'fp32[N] + fp32[N] -> fp32[N]' --on h100 --memory vmem --no-padding",
    "meshwise model 'D=4096 F=14336 L=32 N=32 K=8 V=128256' --seq-len 8Ki",
]


@pytest.mark.parametrize("text", COMMANDS)
def test_a_command_becomes_a_link_and_the_same_command_again(text):
    verb, pairs = parse_command(text)
    path, _, asked = link(verb, pairs).partition("?")
    assert VIEWS[path.strip("/")].verb_of(key for key, _ in pairs) == verb
    assert read_pairs(verb, parse_qsl(asked)) == pairs
    assert parse_command(command(verb, pairs)) == (verb, pairs)
    assert sorted(shlex.split(command(verb, pairs))) == sorted(shlex.split(text))


@settings(max_examples=40)
@given(st.text(min_size=1).map(str.strip).filter(bool), st.text(min_size=1).map(str.strip).filter(bool))
def test_any_text_goes_through_links_and_commands(model, layout):
    pairs = (("model", model), ("on", "h100:8"), ("layout", layout))
    assert tuple(parse_qsl(query(pairs))) == pairs
    assert parse_command(command("estimate train", pairs)) == ("estimate train", pairs)


def test_verbs_are_those_of_the_command_line():
    assert {verb: main.VERBS[verb][0] for verb in VERBS} == VERBS
    assert set(VIEW_OF) == set(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_of_a_command_is_one_of_its_links(verb):
    """But for those that write files, of clusters the one that prints a file, and of the book the one of a folder."""
    fields = {(n, name) for n, request in enumerate(load(verb).requests) for name in request.model_fields}
    missing = {name for n, name in fields - {(o.number, o.name) for o in options(verb).values()}}
    assert missing <= {"save", "svg", "trace", "engine", "prefill_engine", "template", "patch"}
    assert len(options(verb)) == len(fields) - len(missing)


def test_requests_of_a_link_are_those_of_its_command():
    verb, pairs = parse_command(COMMANDS[-4])
    (request, _) = requests_of(verb, pairs)
    assert request.fix == {"tensor": 8, "stage": 2}
    assert (request.seq_len, request.offload) == (4096, False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("meshwise plan train llama-3-8b --foo 3", "unknown option 'foo'"),
        ("meshwise plan train llama-3-8b --save plan.json", "writes a file"),
        ("meshwise plan train llama-3-8b --on", "--on is the last word"),
        ("meshwise model a b", "takes no further word 'b'"),
        ("meshwise run plan.json", "the page shows no command 'run plan.json'"),
        ("meshwise model 'a", "cannot be read"),
        ("meshwise model a --seq-len 1Ki --seq-len 2Ki", "--seq-len is given twice"),
        ("", "the page shows no command ''"),
    ],
)
def test_a_command_that_has_no_link_says_why(text, words):
    with pytest.raises(MeshwiseError, match=words):
        parse_command(text)
