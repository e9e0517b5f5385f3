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
