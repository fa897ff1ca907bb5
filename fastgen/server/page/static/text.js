// A small part of Markdown as elements: code blocks, headings, lists, quotes; code, strong and emphasised text, links.
// Everything is built as text nodes; what is not understood stays as it was written.

import { copy, el } from "./dom.js";

const FENCE = /^\s{0,3}(```+|~~~+)\s*([^`\s]*)[^`]*$/;
const HEADING = /^(#{1,6})\s+(.*?)\s*#*$/;
const BULLET = /^(\s*)([-*+])\s+(.*)$/;
const NUMBERED = /^(\s*)(\d{1,9})[.)]\s+(.*)$/;
const QUOTE = /^\s{0,3}>\s?(.*)$/;
const RULE = /^\s{0,3}([-*_])(\s*\1){2,}\s*$/;
const INLINE = /(`+)([^`]+?)\1(?!`)|\*\*(?=\S)([^*]+?)\*\*|(?<![\w*])\*(?=\S)([^*\n]+?)\*(?!\*)|(?<![\w_])_(?=\S)([^_\n]+?)_(?!\w)|\[([^\]\n]+)\]\((https?:\/\/[^\s)]+)\)/g;

/** Shows `source` in `element`. While it grows, what stands already is kept: selections survive, and it stays cheap. */
export function show(element, source) {
  const wanted = blocks(source);
  const shown = element.shown ?? [];
  let same = 0;
  while (same < shown.length && same < wanted.length && shown[same] === wanted[same].key) same += 1;
  const growing = same === shown.length - 1 && same === wanted.length - 1 && grow(element.children[same], wanted[same]);
  if (!growing) {
    while (element.children.length > same) element.lastElementChild.remove();
    element.append(...wanted.slice(same).map(build));
  }
  element.shown = wanted.map((block) => block.key);
}

/** A code block that only got longer gets more text, and keeps its buttons. */
function grow(element, block) {
  if (block.kind !== "code" || element?.dataset.language !== block.language || !element.classList.contains("code")) return false;
  const code = element.querySelector("code");
  if (!block.text.startsWith(code.textContent)) return false;
  code.append(block.text.slice(code.textContent.length));
  code.normalize();
  return true;
}

function blocks(source) {
  const lines = source.replace(/\r\n?/g, "\n").split("\n");
  const found = [];
  let at = 0;
  const take = (test) => {
    const start = at;
    while (at < lines.length && test(lines[at])) at += 1;
    return lines.slice(start, at);
  };
  while (at < lines.length) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    const heading = HEADING.exec(line);
    if (!line.trim()) at += 1;
    else if (fence) {
      at += 1;
      const closing = (text) => text.trim().startsWith(fence[1]) && !text.trim().replaceAll(fence[1][0], "");
      const text = take((one) => !closing(one)).join("\n");
      at += 1;
      found.push({ kind: "code", language: fence[2], text });
    } else if (heading) {
      at += 1;
      found.push({ kind: "heading", level: heading[1].length, text: heading[2] });
    } else if (RULE.test(line)) {
      at += 1;
      found.push({ kind: "rule", text: "" });
    } else if (QUOTE.test(line)) {
      found.push({ kind: "quote", text: take((one) => QUOTE.test(one)).map((one) => QUOTE.exec(one)[1]).join("\n") });
    } else if (BULLET.test(line) || NUMBERED.test(line)) {
      found.push({ kind: "list", text: take((one) => one.trim() !== "" && !FENCE.test(one)).join("\n") });
    } else {
      const special = (one) => FENCE.test(one) || HEADING.test(one) || QUOTE.test(one) || BULLET.test(one) || NUMBERED.test(one);
      const first = at;
      found.push({ kind: "text", text: take((one) => one.trim() !== "" && (at === first || !special(one))).join("\n") });
    }
  }
  for (const block of found) block.key = `${block.kind} ${block.language ?? block.level ?? ""} ${block.text}`;
  return found;
}

function build(block) {
  switch (block.kind) {
    case "code":
      return codeBlock(block);
    case "heading":
      return el(`h${Math.min(block.level + 2, 6)}`, {}, ...inline(block.text));
    case "rule":
      return el("hr");
    case "quote":
      return el("blockquote", {}, ...blocks(block.text).map(build));
    case "list":
      return list(block.text.split("\n"));
    default:
      return el("p", {}, ...inline(block.text));
  }
}

function codeBlock({ language, text }) {
  const code = el("code", {}, text);
  const button = el("button", { type: "button", class: "quiet", onclick: () => copy(code.textContent, button) }, "Copy");
  const head = el("figcaption", {}, el("span", {}, language || "text"), button);
  return el("figure", { class: "code", "data-language": language }, head, el("pre", { tabindex: "0" }, code));
}

/** Items by their indentation; lines that are no items go on with the one before. */
function list(lines) {
  const items = [];
  for (const line of lines) {
    const found = BULLET.exec(line) ?? NUMBERED.exec(line);
    if (found) items.push({ depth: found[1].length, ordered: /\d/.test(found[2]), start: parseInt(found[2], 10), text: found[3] });
    else if (items.length) items.at(-1).text += `\n${line.trim()}`;
  }
  const nest = (from, to) => {
    const first = items[from];
    const made = el(first.ordered ? "ol" : "ul", first.ordered && first.start !== 1 ? { start: first.start } : {});
    for (let at = from; at < to; ) {
      let end = at + 1;
      while (end < to && items[end].depth > items[at].depth) end += 1;
      const item = el("li", {}, ...inline(items[at].text));
      if (end > at + 1) item.append(nest(at + 1, end));
      made.append(item);
      at = end;
    }
    return made;
  };
  return nest(0, items.length);
}

function inline(text) {
  const nodes = [];
  let last = 0;
  for (const found of text.matchAll(INLINE)) {
    nodes.push(text.slice(last, found.index));
    last = found.index + found[0].length;
    const [, , code, strong, star, under, label, address] = found;
    if (code !== undefined) nodes.push(el("code", {}, code));
    else if (strong !== undefined) nodes.push(el("strong", {}, ...inline(strong)));
    else if (star !== undefined || under !== undefined) nodes.push(el("em", {}, ...inline(star ?? under)));
    else nodes.push(el("a", { href: address, target: "_blank", rel: "noopener noreferrer", title: address }, label));
  }
  nodes.push(text.slice(last));
  return nodes.filter((node) => node !== "");
}
