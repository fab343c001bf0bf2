"""Pages: what they say is what the command line says, and they need neither scripts nor anything from elsewhere."""

import html
import json
import re

import pytest
from starlette.testclient import TestClient

from meshwise.core.units import format_time
from meshwise.exports import TARGETS
from meshwise.web import html as written
from meshwise.web.answers import Answered
from meshwise.web.app import _remembered as answer
from meshwise.web.app import make_app
from meshwise.web.front import points_of, words_of
from meshwise.web.links import command, parse_command, query
from meshwise.web.moves import moves, nearest, timeline
from meshwise.web.stops import stops_of
from meshwise.web.views import COMPARED, VIEWS, link
from tests.web.conftest import as_json, said, text_of, untimed

#: A link of every view and of every kind of layout; those of the views' examples are asked with options of their own.
ASKED = {
    **{name: view.example for name, view in VIEWS.items()},
    "train": "meshwise plan train llama-3-8b --on h100:8 --batch-tokens 512Ki --seq-len 4096",
    "train with a layout": "meshwise estimate train llama-3-8b --on h100:16 --batch-tokens 512Ki --seq-len 4096 "
    "--layout fsdp=16,remat=full --no-changes",
    "train that does not fit": "meshwise estimate train llama-3-8b --on h100:2 --batch-tokens 64Ki --seq-len 4096 "
    "--layout tensor=2 --no-changes",
    "serve with a layout": "meshwise estimate serve llama-3-8b --on h100:8 --batch 64 --layout tensor=8 "
    "--prompt 1024 --output 256 --no-changes",
    "a problem": "meshwise book roofline.q2.Bcrit --set W_hbm=1.6e12",
    "a rule": "meshwise rule critical-batch --on v5e --set w=1",
    "a chapter": "meshwise book roofline",
    "a chip": "meshwise chips h100",
}


@pytest.fixture(scope="module", params=ASKED)
def asked(request, page):
    """Verb, options and the page of a command."""
    verb, pairs = parse_command(ASKED[request.param])
    return verb, pairs, page.get(link(verb, pairs))


def api(verb, pairs):
    return f"/api/{verb.replace(' ', '/')}?{query(pairs)}"


def test_the_page_the_api_and_the_command_say_the_same(asked, page):
    """Sentence, numbers of the short form, and JSON; the command is the one that the page shows."""
    verb, pairs, response = asked
    assert response.status_code == 200
    told = as_json(command(verb, pairs))
    found = page.get(api(verb, pairs))
    assert untimed(found.json()) == untimed(told)
    seen = text_of(response.text)
    assert f"{' '.join(told['answer'].split())}" in seen
    assert command(verb, pairs) in seen


#: Those whose text is made quickly, and without a picture of characters.
@pytest.mark.parametrize("name", ["shard", "model", "collective", "a problem", "a chip", "train with a layout"])
def test_every_number_of_the_terminal_is_on_the_page(page, name):
    verb, pairs = parse_command(ASKED[name])
    code, out, _ = said(command(verb, pairs))
    found = page.get(link(verb, pairs))
    assert page.get(api(verb, pairs)).headers["x-exit-code"] == str(code)
    assert not set(re.findall(r"(?<![\w.])\d[\d,]*\.?\d*", out)) - set(
        re.findall(r"\d[\d,]*\.?\d*", text_of(found.text))
    )


def test_pages_are_small_and_load_nothing_from_elsewhere(asked):
    response = asked[2]
    assert len(response.content) < 500_000
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'self';")
    assert "unsafe" not in policy
    loading = re.sub(r'<a href="https://[^"]+" rel="noreferrer">', "", response.text)  # may be followed, is not loaded
    assert re.findall(r"""(?:src|href|action)=["'](?!/|#)""", loading) == []
    assert not re.search(
        r"<style|\sstyle=|<script(?! src=\"/static/page.js\" defer></script>)|\son[a-z]+=", response.text
    )


def test_headings_labels_and_names_are_in_place(asked):
    body = asked[2].text
    assert body.count("<h1>") == 1
    ids = re.findall(r'\sid="([^"]+)"', body)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'<label for="([^"]+)"', body)) <= set(ids)
    assert set(re.findall(r'aria-describedby="([^"]+)"', body)) <= set(ids)
    fields = re.findall(r'<(?:input|select) id="([^"]+)"', body)
    assert set(fields) == set(re.findall(r'<label for="([^"]+)"', body))
    for svg in re.findall(r"<svg[^>]*>", body):
        assert 'aria-hidden="true"' in svg or 'role="img" aria-label=' in svg


def test_answers_go_through_json_unchanged():
    found = answer(*parse_command(ASKED["roofline"]))
    assert Answered.from_json(found.to_json()).json_of(explain=True) == json.loads(
        json.dumps(found.json_of(explain=True))
    )


def test_a_view_without_a_question_answers_its_example(page):
    for name in ("roofline", "shard", "model"):
        body = page.get(f"/{name}").text
        assert "An example." in body
        assert command(VIEWS[name].verb, VIEWS[name].preset()) in text_of(body)


def test_the_start_page_answers_four_examples(page):
    body = page.get("/").text
    assert body.count('class="sentence"') == 4
    for name in ("roofline", "shard"):
        assert as_json(VIEWS[name].example)["answer"] in text_of(body)


def test_empty_fields_and_defaults_of_a_form_leave_the_link(page):
    assert page.get("/model?model=llama-3-8b&kv-dtype=bf16").headers["location"] == "/model?model=llama-3-8b"
    found = page.get("/roofline?expression=fp32[N]+%2B+fp32[N]+->+fp32[N]&on=h100&set=&vary=&memory=hbm&padding=yes&b=")
    assert found.status_code == 303
    assert (
        found.headers["location"] == "/roofline?expression=fp32%5BN%5D%20%2B%20fp32%5BN%5D%20-%3E%20fp32%5BN%5D&on=h100"
    )


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/roofline?on=v5q&expression=fp32[N]->fp32[N]", 400, "unknown chip 'v5q'. Nearest:"),
        ("/roofline?expression=fp32[N]->fp32[N]", 400, "--on is missing"),
        ("/train?model=llama-3-8b&on=v5e:4x8&batch-tokens=many&seq-len=4096", 400, "--batch-tokens: expected a number"),
        ("/train?model=llama-3-8b&on=v5e:4x8&foo=1", 400, "unknown option 'foo'"),
        ("/train?model=llama-3-8b&save=/tmp/x", 400, "writes a file"),
        ("/train?model=llama-3-8b&front=maybe", 400, "--front: expected yes or no, found 'maybe'"),
        ("/train?model=llama-3-70b&on=v5e&batch-tokens=64Ki&seq-len=4096", 422, "does not fit on v5e"),
        ("/serve?model=llama-3-8b&on=h100:8", 400, "--prompt and --output are missing"),
        ("/shard?expression=A[I_X&mesh=X=4", 400, "^"),
        ("/book?problem=roofline.q9", 400, "no problem 'roofline.q9'; nearest:"),
        ("/trian", 404, "/train"),
        ("/go?command=meshwise+rum", 400, "the page shows no command"),
        ("/compare?a=meshwise+rum&b=--on+v5e", 400, "the page shows no command"),
        ("/files/plan.json?verb=plan+trian", 400, "expected one of plan train"),
        ("/files/passwd?verb=model&model=llama-3-8b", 400, "writes no 'passwd'"),
        ("/model?model=%3Cscript%3Ealert(1)%3C/script%3E", 400, "<script>alert(1)</script>"),
    ],
)
def test_wrong_input_is_said_in_words(page, path, status, words):
    found = page.get(path)
    assert found.status_code == status
    assert words in text_of(found.text)
    assert "<script>alert" not in found.text
    assert "Traceback" not in found.text


def test_the_field_that_is_wrong_is_marked(page):
    body = page.get("/train?model=llama-3-8b&on=v5e:4x8&batch-tokens=many&seq-len=4096").text
    (field,) = re.findall(r'<input id="([^"]+)"[^>]*aria-invalid="true"', body)
    assert field == "f-batch-tokens"
    assert 'value="many"' in body
    assert text_of(body).count("--batch-tokens: expected a number") == 1


@pytest.mark.parametrize(
    ("text", "words", "led"),
    [
        ("serve with a layout", "meshwise plan serve", "/serve?model="),
        ("train with a layout", "meshwise plan train with the same options", "/train?model="),
        ("serve with changes", "--batch<", "&amp;batch="),
        ("chips", "meshwise chips v5p", "/chips?chip=v5p"),
    ],
)
def test_commands_in_sentences_lead_to_the_same_question(page, text, words, led):
    asked = ASKED[text] if text in ASKED else ASKED["serve with a layout"].removesuffix(" --no-changes")
    body = page.get(link(*parse_command(asked))).text.replace('<span class="whole">', "")
    (href,) = re.findall(rf'<a href="([^"]*)">{words}', body)
    assert led in href
    assert page.get(html.unescape(href)).status_code == 200


def test_a_name_that_is_not_known_marks_its_field_and_leads_to_those_that_are(page):
    body = page.get("/train?model=no-such-model&on=v5e:4x8&batch-tokens=512Ki&seq-len=4096").text
    assert re.findall(r'<input id="([^"]+)"[^>]*aria-invalid="true"', body) == ["f-model"]
    assert '<a href="/models">all models</a>' in body


def test_errors_of_the_api_are_those_of_the_command_line(page):
    for text in ("meshwise chips v5q", "meshwise plan train llama-3-70b --on v5e --batch-tokens 64Ki --seq-len 4096"):
        verb, pairs = parse_command(text)
        assert page.get(api(verb, pairs)).json() == as_json(text)


def test_another_host_name_and_other_sites_are_refused(page):
    assert page.get("/roofline", headers={"host": "evil.example"}).status_code == 400
    assert (
        page.get("/api/models", headers={"sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"}).status_code == 403
    )
    linked = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert page.get("/models", headers=linked).status_code == 200
    assert page.post("/roofline").status_code == 405


def test_files_are_those_that_the_command_writes(page, tmp_path):
    text = ASKED["train with a layout"]
    verb, pairs = parse_command(text)
    asking = query((("verb", verb), *pairs))
    plan = tmp_path / "plan.json"
    said(f"{text} --save {plan}")
    assert page.get(f"/files/plan.json?{asking}").text == plan.read_text()
    body = page.get(link(verb, pairs)).text
    tools = set(re.findall(r'href="/files/(\w+)\?', body)) & set(TARGETS)
    assert tools
    tool = min(tools)
    assert page.get(f"/files/{tool}?{asking}").text == said(f"meshwise export {plan} --to {tool}")[1]


@pytest.mark.parametrize(("first", "second"), [(a, b) for _, a, b in COMPARED])
def test_two_are_compared(page, first, second):
    sent = page.get("/compare", params={"a": first, "b": second})
    assert sent.status_code == 303
    body = text_of(page.get(sent.headers["location"]).text)
    whole = f"{first} {second if second.startswith('--') else f'--layout {second}'}"
    flag = whole.rsplit(second.split()[0], maxsplit=1)[-1].split() if second.startswith("--") else []
    other = re.sub(r" --on \S+(?=.* --on )", "", whole) if flag else re.sub(r" --layout \S+(?=.* --layout )", "", whole)
    assert as_json(first)["answer"] in body
    assert f"B: {as_json(other)['answer']}" in body
    assert "B against A" in body


@pytest.mark.parametrize(
    "name", ["train with a layout", "serve with a layout", "roofline", "shard", "model", "a problem", "a rule"]
)
def test_every_stop_of_a_slider_is_a_link_that_answers(page, name):
    verb, pairs = parse_command(ASKED[name])
    stops = stops_of(answer(verb, pairs), {})
    assert stops
    for one in stops:
        assert one.own in one.values, one.name
        for href in (next(iter(one.values.values())), list(one.values.values())[-1]):
            found = page.get(href)
            assert found.status_code == 200, (one.name, href, text_of(found.text)[:900])


def test_a_problem_has_sliders_for_what_its_working_uses():
    """Its question gives the sizes of the whole model, the bytes of one layer's activations need three numbers."""
    stops = stops_of(answer(*parse_command("meshwise book training.q3.layer_tp")), {})
    assert {one.name for one in stops} == {"batch", "D", "X", "MY", "W_ici_bidi"}


def test_a_point_of_the_front_is_a_link_and_is_estimated_alike(page):
    """Its words are the slider's, its estimate has its numbers; a point that there is not chooses none."""
    verb, pairs = parse_command("meshwise plan serve llama-3-8b --on h100:8 --prompt 1024 --output 256 --no-simulate")
    found = answer(verb, pairs)
    (along,) = (s for s in stops_of(found, {"at": "2"}) if s.kind == "along")
    points = points_of(found.envelope)
    assert len(along.values) == len(points) > 10
    assert along.own == list(along.values)[2] == words_of(points[2])
    body = page.get(along.values[along.own]).text
    assert f"Chosen: {along.own.partition(',')[0]} a token" in text_of(body)
    assert body.count('tabindex="-1"><circle') == len(points)
    path, _, asked = html.unescape(re.search(r"Chosen: .*?<a href=\"([^\"]+)\"", body)[1]).partition("?")
    same = page.get(f"/api/estimate{path}?{asked}").json()["plans"][0]
    for part in ("tpot_s", "output_tokens_per_s"):  # an estimate chooses the batch of its prefills itself
        assert same[part] == pytest.approx(points[2][part], rel=0.02)
    for nothing in ("99", "-1", "x", ""):
        assert "Chosen" not in page.get(f"{along.values[along.own].rpartition('=')[0]}={nothing}").text


@pytest.mark.parametrize(
    "text",
    [
        "meshwise plan train llama-3-8b --on h100:8 --batch-tokens 512Ki --seq-len 4096",
        "meshwise plan serve llama-3-70b --on h100:8 --prompt 1024 --output 256",
    ],
)
def test_the_plans_of_a_search_are_links_with_the_same_numbers(page, text):
    found = answer(*parse_command(text))
    shown = moves(found)
    assert len(shown) == len(found.envelope["plans"])
    for move, plan in list(zip(shown, found.envelope["plans"], strict=True))[:2]:
        path, _, asked = move.href.partition("?")
        verb = VIEWS[path.strip("/")].layout_verb
        again = page.get(f"/api/{verb.replace(' ', '/')}?{asked}").json()["plans"][0]
        for part in ("estimate", "tpot_s", "ttft_s", "output_tokens_per_s"):
            assert again.get(part) == plan.get(part)
        assert "B against A" in page.get(move.beside).text
    if (step := timeline(found)) is not None:
        simulated = page.get(f"/api/simulate{step.replace('timeline', 'train')}").json()["step_time_s"]
        expected = found.envelope["plans"][0]["estimate"]["step_time_s"]["expected"]
        assert simulated == pytest.approx(expected, rel=1e-12)  # added up piece by piece


SEVERAL = "meshwise plan train gemma-3-1b --on h100:2,h200:2 --batch-tokens 64Ki --seq-len 4096"
SCALED = "meshwise plan train gemma-3-1b --on h100:4 --batch-tokens 64Ki --seq-len 4096 --scaling"
SERVED = "meshwise plan serve llama-3-8b --on h100:1,h200:1 --prompt 128 --output 32 --max-batch 8"


@pytest.mark.parametrize(
    ("text", "question"),
    [
        pytest.param(SEVERAL, "which cheaper?", marks=pytest.mark.slow),  # two searches, 2 CPU-seconds
        pytest.param(SCALED, "does it scale?", marks=pytest.mark.slow),  # three searches, 2 CPU-seconds
        (SERVED, "Look at"),
    ],
)
def test_several_clusters_and_scaling_have_pages(page, text, question):
    verb, pairs = parse_command(text)
    found = page.get(link(verb, pairs))
    assert found.status_code == 200
    assert answer(verb, pairs).envelope["answer"] in text_of(found.text)
    assert question in found.text
    for move in moves(answer(verb, pairs))[:1]:
        assert page.get(move.href).status_code == 200


def test_a_bug_is_said_in_words(monkeypatch):
    def wrong(*_given):
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("meshwise.web.pages.stops_of", wrong)
    with TestClient(make_app(processes=False), base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        found = client.get("/models")
    assert found.status_code == 500
    assert "this is a bug in meshwise: ZeroDivisionError: division by zero" in found.text
    assert found.headers["content-security-policy"]


def test_where_nothing_fits_more_chips_are_a_link(page):
    found = answer(*parse_command("meshwise plan train llama-3-70b --on v5e --batch-tokens 64Ki --seq-len 4096"))
    words = dict(nearest(found))
    assert "what fits there" in words
    assert "/train?model=llama-3-70b&on=v5e:64&batch-tokens=64Ki&seq-len=4096" in words.values()


def test_the_name_that_was_meant_is_a_link(page):
    found = page.get("/train?model=llama-3-8c&on=v5e:4x8&batch-tokens=512Ki&seq-len=4096")
    assert found.status_code == 400
    assert (
        'href="/train?model=llama-3-8b&amp;on=v5e:4x8&amp;batch-tokens=512Ki&amp;seq-len=4096">llama-3-8b</a>'
        in found.text
    )
    assert (
        'href="/roofline?expression=fp32%5BN%5D%20-%3E%20fp32%5BN%5D&amp;on=v5e"'
        in page.get("/roofline?expression=fp32[N]+->+fp32[N]&on=v5q").text
    )


def test_while_a_slider_is_held_no_breakdown_is_made(page):
    verb, pairs = parse_command(ASKED["roofline"])
    whole, held = (page.get(link(verb, pairs), headers=more).text for more in ({}, {"x-held": "1"}))
    assert "Breakdown" in whole
    assert "Breakdown" not in held
    shown = r'(?s)<section id="answer".*?</section>|<div id="shown">.*?\n</div>'
    assert re.findall(shown, whole) == re.findall(shown, held)


def test_a_plan_shows_what_it_waits_for_and_where_it_lies(page):
    body = page.get(link(*parse_command(ASKED["train with a layout"]))).text
    plan = answer(*parse_command(ASKED["train with a layout"])).envelope["plans"][0]
    waited, hidden = plan["estimate"]["terms"]["fsdp"], plan["estimate"]["hidden_s"]["fsdp"]
    assert f"fsdp {format_time(waited)} {format_time(hidden)}" in text_of(body)
    assert "nvlink 8 fsdp 8" in text_of(body)


def test_collectives_are_stepped_through(page):
    verb, pairs = parse_command(ASKED["shard"])
    start, step = (page.get(f"{link(verb, pairs)}&step={n}&device=3").text for n in (0, 1))
    assert "Device X=1, Y=1" in start
    assert "before: C[I_X, K_Y]" in step
    assert "talks with it" in step
    assert "talks with it" not in start


def test_a_block_that_html_does_not_know_is_kept_as_text():
    class Odd:
        def __rich_console__(self, console, options):
            yield "a < b"

    assert "a &lt; b" in written.html_of([Odd()])


@pytest.mark.parametrize("name", ASKED)
def test_a_question_with_an_option_missing_or_wrong_is_answered_in_words(page, name):
    verb, pairs = parse_command(ASKED[name])
    for place, (key, _) in enumerate(pairs):
        for other in ((), ((key, "no-such"),), ((key, "-1"),)):
            answered = page.get(link(verb, pairs[:place] + other + pairs[place + 1 :]))
            assert answered.status_code < 500
            assert answered.is_redirect or "<h2>" in answered.text


def test_a_problem_is_shown_without_its_answer_and_with_other_constants_by_links(page):
    shown = page.get("/book?problem=roofline.q2.Bcrit").text
    ways = re.findall(r'<p class="choice">.*?</p>', shown, re.DOTALL)
    links = [html.unescape(href) for way in ways for href in re.findall(r'href="([^"]+)"', way)]
    one = "/book?problem=roofline.q2.Bcrit"
    assert links == [one, f"{one}&hint=yes", one, f"{one}&constants=catalog"]
    hint = text_of(page.get(links[1]).text)
    assert "The rule 'critical-batch'" in hint
    assert "120.1" not in hint
    assert "60 is not right" in text_of(page.get(f"{one}&answer=60&hint=yes").text)
    assert "120.269 tokens" in text_of(page.get(links[3]).text)
    questions = page.get("/book?problem=roofline.q1&hint=yes").text
    assert 'href="/book?problem=roofline.q1.ops&amp;hint=yes"' in questions
    assert "8.5899e+09" not in questions
