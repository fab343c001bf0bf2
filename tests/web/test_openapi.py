"""The description of the API, held against the commands."""

import pytest

from meshwise.web.links import VERBS, options, parse_command
from meshwise.web.openapi import description
from meshwise.web.views import VIEWS

PATHS = description()["paths"]


def test_every_verb_has_a_path(page):
    assert page.get("/api/openapi.json").json() == description()
    assert set(PATHS) == {f"/api/{verb.replace(' ', '/')}" for verb in VERBS}


@pytest.mark.parametrize("verb", VERBS)
def test_parameters_are_the_options(verb):
    told = PATHS[f"/api/{verb.replace(' ', '/')}"]["get"]["parameters"]
    assert [p["name"] for p in told] == [*options(verb), "explain"]
    assert all(p["description"] for p in told)


@pytest.mark.parametrize("view", VIEWS.values(), ids=lambda view: view.name)
def test_examples_give_what_is_required(view):
    told = PATHS[f"/api/{view.verb.replace(' ', '/')}"]["get"]["parameters"]
    given = {key for key, _ in parse_command(view.example)[1]}
    assert {p["name"] for p in told if p["required"]} <= given


def test_what_is_required_is_missed(page):
    for verb, name in (("roofline", "expression"), ("plan train", "model")):
        answer = page.get(f"/api/{verb.replace(' ', '/')}")
        assert answer.status_code == 400
        assert f"{name.upper()} is missing" in answer.json()["error"]["message"]
