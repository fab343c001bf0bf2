// What the page does besides links and forms, which work without it: sliders over links, copying, keys, printing,
// and words when the server has stopped. Everything shown is drawn by the server.
"use strict";

const one = (selector, within = document) => within.querySelector(selector);
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
let running = null;      // the request of the last move of a slider
let telling = 0;         // the timer that tells screen readers the new answer

// Say that the server does not answer, and how it is started again at this place.
function gone(link) {
  const box = one("#gone");
  one("code", box).textContent = `meshwise ui '${link.replaceAll("'", "'\\''")}'`;
  box.hidden = false;
}

// Fetch the page of a link; null when a later move has replaced it. While a slider is held no breakdown is made.
async function fetched(link, held = false) {
  running?.abort();
  running = new AbortController();
  try {
    const answer = await fetch(link, {signal: running.signal, headers: held ? {"x-held": "1"} : {}});
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    one("#gone").hidden = true;
    return page;
  } catch (error) {
    if (error.name !== "AbortError") gone(link);
    return null;
  }
}

// Tell the new answer once it rests.
function tell(words) {
  clearTimeout(telling);
  telling = setTimeout(() => { one("#status").textContent = words; }, 500);
}

// Put the parts of a page in the place of those that are shown; while a slider is held, the sliders stay.
function swap(page, held) {
  const parts = held ? ["#answer", "#shown"] : ["#answer", ".ask", ".rest"];
  const failed = one("#answer.problem", page);
  all("#shown").forEach(part => part.classList.toggle("stale", Boolean(failed)));
  for (const part of parts) {
    const found = one(part, page), here = one(part);
    if (found && here) {
      const open = all("details[open] > summary", here).map(s => s.textContent);
      here.replaceWith(document.adoptNode(found));
      all("details > summary", one(part)).filter(s => open.includes(s.textContent)).forEach(s => { s.parentNode.open = true; });
      all(".asking", one(part)).forEach(d => { d.open = open.includes(one("summary", d).textContent); });
    }
  }
  document.title = page.title;
  tell(one("#answer").dataset.status ?? "");
  prepare(one("main"));
}

// Turn the links of one quantity into a slider over them.
function slider(row) {
  const links = all("a", row), name = one(".name", row);
  const input = document.createElement("input"), output = document.createElement("output");
  const own = links.findIndex(a => a.hasAttribute("aria-current"));
  Object.assign(input, {type: "range", min: 0, max: links.length - 1, step: 1, value: Math.max(own, 0)});
  input.setAttribute("aria-labelledby", name.id);
  const show = () => {
    output.textContent = links[input.value].textContent;
    input.setAttribute("aria-valuetext", output.textContent);
  };
  let shown = null, from = null;
  input.addEventListener("input", async () => {
    show();
    const link = links[input.value].getAttribute("href");
    from ??= location.pathname + location.search;
    const page = await fetched(link, true);
    if (page === null) return;
    shown = page;
    history.replaceState(null, "", link);
    swap(page, true);
  });
  input.addEventListener("change", async () => {
    const link = links[input.value].getAttribute("href"), before = from;
    from = null;
    const page = await fetched(link) ?? shown;
    if (page === null) return;
    if (before !== null) history.replaceState(null, "", before);  // Back undoes the whole move
    history.pushState(null, "", link);
    const place = all(".stop").indexOf(row);
    swap(page, false);
    one("input[type=range]", all(".stop")[place] ?? document.createElement("p"))?.focus();
  });
  show();
  links.forEach(a => { a.hidden = true; });
  row.append(input, output);
}

// Copy a text, and say so on the button.
async function copy(button) {
  const text = button.dataset.copy === "link" ? location.origin + button.dataset.link : one("#command").textContent;
  const words = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed: select it above";
  }
  setTimeout(() => { button.textContent = words; }, 1500);
}

// What new parts of the page need.
function prepare(within) {
  all("button.js[hidden]", within).forEach(button => {
    button.hidden = false;
    button.addEventListener("click", () => copy(button));
  });
  all(".stop", within).filter(row => !one("input", row)).forEach(slider);
}

// Drag along the points of a chart: the nearest one is chosen, as by the slider over the same links.
let dragging = false;
function toward(event) {
  const points = all("svg.front a"), input = one(".stop.along input");
  const far = ({x, y, width, height}) => Math.hypot(x + width / 2 - event.clientX, y + height / 2 - event.clientY);
  const away = points.map(a => far(a.getBoundingClientRect()));
  const nearest = away.indexOf(Math.min(...away));
  if (nearest < 0 || !input || input.valueAsNumber === nearest) return;
  input.value = nearest;
  input.dispatchEvent(new Event("input"));
}
document.addEventListener("pointerdown", event => {
  dragging = !event.button && event.target.closest("svg.front") !== null;
  if (dragging) { event.preventDefault(); toward(event); }
});
document.addEventListener("pointermove", event => { if (dragging) toward(event); });
document.addEventListener("pointerup", () => {
  if (dragging) one(".stop.along input")?.dispatchEvent(new Event("change"));
  dragging = false;
});
document.addEventListener("pointercancel", () => { dragging = false; });

// A form or a link that leads nowhere because the server has stopped: ask it first.
async function leave(event, link, go) {
  event.preventDefault();
  try {
    await fetch("/static/icon.svg", {method: "HEAD", cache: "no-store"});
  } catch {
    gone(link);
    return;
  }
  go();
}

document.addEventListener("submit", event => {
  const form = event.target;
  if (form.method !== "get") return;
  all("input, select", form).forEach(field => { field.disabled = field.disabled || field.value === ""; });
  const query = new URLSearchParams(new FormData(form)).toString();
  const path = new URL(form.action).pathname;
  all(":disabled", form).forEach(field => { field.disabled = false; });
  leave(event, `${path}?${query}`, () => { location.assign(`${path}?${query}`); });
});

document.addEventListener("click", event => {
  const a = event.target.closest("a[href]");
  if (a?.closest("svg.front") && one(".stop.along input")) { event.preventDefault(); return; }  // dragged there already
  if (!a || a.hasAttribute("download") || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
  const link = a.getAttribute("href");
  if (link.startsWith("/")) leave(event, link, () => { location.assign(link); });
});

document.addEventListener("keydown", event => {
  if (event.target.matches("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "?") one("#help")?.showModal();
  if (event.key === "c") one("button[data-copy=command]")?.click();
  if (event.key === "/") {
    event.preventDefault();
    all(".asking").forEach(d => { d.open = true; });
    one(".ask input, .gofrom input")?.focus();
  }
});

addEventListener("popstate", async () => {
  const page = await fetched(location.pathname + location.search);
  if (page !== null) swap(page, false);
});

addEventListener("beforeprint", () => all("details.more, figure details").forEach(d => { d.open = true; }));

// On a narrow screen the form is folded away below its answer.
const narrow = matchMedia("(max-width: 35.99rem)");
function fold() {
  all(".asking").forEach(d => { d.open = !narrow.matches || one("#answer.problem") !== null; });
}
narrow.addEventListener("change", fold);
fold();
prepare(document);
