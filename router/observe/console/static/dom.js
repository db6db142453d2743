// Elements of a page. Names of workers, models and tenants become text nodes, never markup.

// Controls, and marks that turn the direction of writing, would make one name look like another.
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g;

/** A text with a sign in the place of each unseen character. */
export function seen(text) {
  return text.replace(UNSEEN, "\ufffd");
}

/** An element. attributes: null leaves one out; `on` has listeners. children: nodes and texts. */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) made.addEventListener(event, listener);
    } else {
      set(made, name, value);
    }
  }
  for (const child of children) {
    if (child !== null && child !== undefined) made.append(child instanceof Node ? child : seen(String(child)));
  }
  return made;
}

/** Sets an attribute, unless it has the value; null, undefined and false remove it. */
export function set(element, name, value) {
  if (value === null || value === undefined || value === false) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
  } else {
    const text = value === true ? "" : seen(String(value));
    if (element.getAttribute(name) !== text) element.setAttribute(name, text);
  }
}

/** Sets the text of an element, unless it has it. */
export function write(element, text) {
  const shown = seen(text);
  if (element.textContent !== shown) element.textContent = shown;
}

/** The element of an id. */
export function at(id) {
  return document.getElementById(id);
}

/** A bar whose filled part is a share of 0 to 1. */
export function bar(share, kind = "", label = null) {
  const fill = el("i", { class: "fill" });
  fill.style.width = `${100 * Math.min(1, Math.max(0, share || 0))}%`;
  return el("span", { class: `bar ${kind}`, role: label ? "img" : null, "aria-label": label,
    "aria-hidden": label ? null : "true" }, fill);
}

/**
 * Makes the children of a parent those of some items, in order; elements of kept keys stay, with
 * focus and scroll. make(item) makes one, update(element, item) brings one up to date.
 */
export function keyed(parent, items, key, make, update) {
  const old = parent.kept ?? new Map();
  const kept = new Map();
  let place = parent.firstChild;
  for (const item of items) {
    const name = key(item);
    let child = old.get(name);
    if (child === undefined) child = make(item);
    update?.(child, item);
    kept.set(name, child);
    if (child === place) {
      place = place.nextSibling;
    } else {
      parent.insertBefore(child, place);
    }
  }
  for (const [name, child] of old) if (kept.get(name) !== child) child.remove();
  parent.kept = kept;
}
