// Elements made in code. Text always goes in as text: nothing that a model, a client or a server says becomes HTML.

export function find(id) {
  const element = document.getElementById(id);
  if (element === null) throw new Error(`the page has no #${id}`);
  return element;
}

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.className = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

// Sets the text only if it is new, so that screen readers and the browser's layout hear of changes alone.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const SVG = "http://www.w3.org/2000/svg";

// A short piece of a chart's line: its color by name, and its dashes in pixels.
export function sample(color, dash) {
  const line = document.createElementNS(SVG, "line");
  for (const [name, value] of Object.entries({ x1: 0, x2: 24, y1: 3, y2: 3, "stroke-dasharray": dash.join(" ") || "none" })) line.setAttribute(name, value);
  const picture = document.createElementNS(SVG, "svg");
  for (const [name, value] of Object.entries({ class: `sample ${color}`, width: 24, height: 6, "aria-hidden": "true" })) picture.setAttribute(name, value);
  picture.append(line);
  return picture;
}
