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

// Called by the chapter's own script with its answers.
window.recorded = (answers) => {
  for (const place of document.querySelectorAll("div.vary")) {
    const problem = answers[place.dataset.problem];
    if (!problem) continue;
    const details = document.createElement("details");
    details.append(Object.assign(document.createElement("summary"), { textContent: "Other numbers" }));
    details.addEventListener("toggle", () => details.childElementCount === 1 && build(details, problem));
    place.append(details);
  }
};
