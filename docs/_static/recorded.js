// Sliders over recorded answers: each problem of a chapter, one of its numbers varied at a time.
"use strict";

const shown = (value) => {
  if (typeof value !== "number") return value;
  const large = Math.abs(value) >= 1e6 || Math.abs(value) < 1e-3;
  return value && large ? String(Number(value.toPrecision(6)).toExponential()) : value.toLocaleString("en", { maximumSignificantDigits: 6 });
};

// What a problem answers with one number at one of its values.
const sentence = (name, input, at, unit) => {
  const answer = input.answers[at];
  const given = `${name} = ${shown(input.values[at])}${at === input.own ? " (as asked)" : ""}`;
  return typeof answer === "object" ? `${given}: no answer: ${answer.no}` : `${given}: ${shown(answer)} ${unit}`;
};

const build = (details, problem) => {
  const said = document.createElement("output");
  said.setAttribute("role", "status");
  const sliders = [];
  const moves = Object.entries(problem.inputs).filter(([, input]) => new Set(input.answers.map(String)).size > 1);
  for (const [name, input] of moves) {
    const label = document.createElement("label"), slider = document.createElement("input");
    Object.assign(slider, { type: "range", min: 0, max: input.values.length - 1, step: 1, value: input.own });
    const say = () => slider.setAttribute("aria-valuetext", String(shown(input.values[slider.value])));
    slider.addEventListener("input", () => {
      for (const [other, own] of sliders) if (other !== slider) other.value = own; // recorded one at a time
      say();
      said.textContent = sentence(name, input, Number(slider.value), problem.unit);
    });
    say();
    sliders.push([slider, input.own]);
    label.append(`${name} `, slider);
    details.append(label);
  }
  const still = Object.keys(problem.inputs).filter((name) => !moves.some(([moved]) => moved === name));
  said.textContent = moves.length ? sentence(moves[0][0], moves[0][1], moves[0][1].own, problem.unit) : "";
  details.append(said);
  if (still.length) details.append(Object.assign(document.createElement("p"), { textContent: `Changes nothing: ${still.join(", ")}.` }));
};

// Whether a reader's own answer is ours; a number is in the problem's unit, or in one that it names.
const judged = (text, { answer, tolerance, unit }, { units, slips }) => {
  const given = text.trim();
  const letters = (words) => words.toLowerCase().replaceAll("×", "x").replace(/\s/g, "");
  const counted = (words) => (unit === "slice" ? letters(words).split("x").sort().join("x") : letters(words)); // a slice has no order
  if (typeof answer === "string") return counted(given) === counted(answer) ? "Right." : "Not so.";
  const [, digits, named] = given.match(/^([-+\d.,]+(?:e[-+]?\d+)?)\s*(.*)$/i) ?? [];
  if (digits === undefined || Number.isNaN(Number(digits.replaceAll(",", "")))) return `A number of ${unit}, please.`;
  if (named && !(named in units[unit])) return `Not so: ${named} is no unit of this answer, which is in ${unit}.`;
  const number = Number(digits.replaceAll(",", "")) * (named ? units[unit][named] : 1);
  if (Math.abs(number - answer) <= tolerance * Math.max(Math.abs(number), Math.abs(answer))) return "Right.";
  const ratio = number / answer, slip = slips.find(([factor]) => Math.abs(Math.max(ratio, 1 / ratio) / factor - 1) < 0.006);
  return `Not so: ${shown(Number(ratio.toPrecision(3)))} times as much${slip ? ` (mixed up: ${slip[1]}?)` : ""}. The unit is ${unit}.`;
};

// Problems that this reader has solved are marked, in the list of the page, too; only this browser knows them.
const SOLVED = "meshwise-solved";
const solved = () => {
  try { return JSON.parse(localStorage.getItem(SOLVED) ?? "[]"); } catch { return []; }
};
const mark = (place) => {
  const section = place.closest("section");
  const links = document.querySelectorAll(`a[href="#${CSS.escape(section.id)}"]:not(.headerlink)`);
  [section.querySelector("h3"), ...links].forEach((named) => named?.classList.add("solved"));
};
const solve = (place) => {
  mark(place);
  try { localStorage.setItem(SOLVED, JSON.stringify([...new Set([...solved(), place.dataset.problem])])); } catch { /* not kept */ }
};

// A field for the reader's own answer.
const check = (place, problem, told) => {
  const form = document.createElement("form"), label = document.createElement("label");
  const field = document.createElement("input"), said = document.createElement("output");
  const words = `Your answer, ${problem.asks}`;
  Object.assign(field, { type: "text", autocomplete: "off", inputMode: typeof problem.answer === "string" ? "text" : "decimal" });
  label.append(`${words} `, field);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    said.textContent = judged(field.value, problem, told);
    if (said.textContent === "Right.") solve(place);
  });
  form.append(label, Object.assign(document.createElement("button"), { textContent: "Check" }), said);
  place.append(form);
};

addEventListener("beforeprint", () => document.querySelectorAll("details.worked, details.catalog").forEach((d) => { d.open = true; }));

// Called by the chapter's own script with its problems, and the units in which they may be answered.
window.recorded = ({ problems, lists, ...told }) => {
  for (const problem of Object.values(problems)) for (const input of Object.values(problem.inputs)) input.values = lists[input.values];
  const before = solved(), places = [...document.querySelectorAll("div.check")];
  places.forEach((place) => check(place, problems[place.dataset.problem], told));
  // The list of the page stands behind this script.
  addEventListener("DOMContentLoaded", () => places.filter((place) => before.includes(place.dataset.problem)).forEach(mark));
  for (const place of document.querySelectorAll("div.vary")) {
    const problem = problems[place.dataset.problem];
    if (!Object.keys(problem.inputs).length) continue;
    const details = document.createElement("details");
    details.append(Object.assign(document.createElement("summary"), { textContent: "Other numbers" }));
    details.addEventListener("toggle", () => details.childElementCount === 1 && build(details, problem));
    place.append(details);
  }
};
