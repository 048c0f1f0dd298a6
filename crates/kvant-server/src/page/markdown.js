/* Converts Markdown to DOM nodes. markdown-it parses it, and this file makes elements and text of its tokens, so that no
   HTML of an answer is ever parsed. The page's policy (documents.rs) forbids parsing HTML. */

const markdown = markdownit({ html: false, linkify: true });
/* Links that load only when the user clicks them. */
markdown.validateLink = url => /^(https?:\/\/|mailto:)/i.test(url);
markdown.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });

const TAGS = new Set("p ul ol li blockquote table thead tbody tr th td em strong s a".split(" "));

export function element(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

function link(url, title, ...children) {
  return element("a", { href: url, title: title ?? "", target: "_blank", rel: "noopener noreferrer" }, ...children);
}

function code(token) {
  const pre = element("pre", { tabIndex: 0 }, element("code", { textContent: token.content }));
  const copy = element("button", { type: "button", className: "plain copy-code", textContent: "Copy" });
  copy.setAttribute("aria-label", "Copy the code");
  const language = element("span", { textContent: token.info.trim().split(/\s/)[0] });
  return element("div", { className: "code" }, element("div", { className: "row" }, language, copy), pre);
}

/* The node of a token that has no closing token, or its text. */
function leaf(token) {
  switch (token.type) {
    case "code_inline": return element("code", { textContent: token.content });
    case "code_block": case "fence": return code(token);
    case "softbreak": return "\n";
    case "hardbreak": return element("br");
    case "hr": return element("hr");
    /* An image would load from another server. */
    case "image": return link(token.attrGet("src"), token.attrGet("title"), "image: " + (token.content || token.attrGet("src")));
    default: return token.content;
  }
}

/* The outer and the inner element of an opening token. */
function open(token) {
  const heading = /^h([1-6])$/.exec(token.tag);
  /* The page itself uses headings of the first two levels. */
  if (heading) return twice(element("h" + Math.min(Number(heading[1]) + 2, 6)));
  if (token.tag === "a") return twice(link(token.attrGet("href"), token.attrGet("title")));
  const node = element(TAGS.has(token.tag) ? token.tag : "span");
  if (token.tag === "table") {
    const scroller = element("div", { className: "table", tabIndex: 0 }, node);
    scroller.setAttribute("role", "region");
    scroller.setAttribute("aria-label", "Table");
    return [scroller, node];
  }
  if (token.tag === "ol" && token.attrGet("start") !== null) node.start = token.attrGet("start");
  const side = /text-align:(left|center|right)/.exec(token.attrGet("style") ?? "");
  if (side) node.style.textAlign = side[1];
  return twice(node);
}

const twice = node => [node, node];

function build(tokens, root) {
  const stack = [root];
  for (const token of tokens) {
    const parent = stack.at(-1);
    if (token.type === "inline") build(token.children, parent);
    else if (token.nesting === -1) stack.pop();
    else if (token.nesting === 0) parent.append(leaf(token));
    else if (token.hidden) stack.push(parent);
    else {
      const [outer, inner] = open(token);
      parent.append(outer);
      stack.push(inner);
    }
  }
}

/* The tokens of each top-level block. */
function blocks(tokens) {
  const found = [];
  let depth = 0, start = 0;
  tokens.forEach((token, index) => {
    depth += token.nesting;
    if (depth === 0) {
      found.push(tokens.slice(start, index + 1));
      start = index + 1;
    }
  });
  return found;
}

/* Renders a text in `root`. While the text grows, unchanged blocks keep their nodes, and with them the selection. */
export function render(text, root) {
  let all;
  try {
    all = blocks(markdown.parse(text, {}));
  } catch {
    root.shown = null;
    root.textContent = text;
    return;
  }
  const before = root.shown ?? [];
  if (!root.shown) root.replaceChildren();
  root.shown = all.map(block => JSON.stringify(block));
  const same = root.shown.findIndex((key, index) => key !== before[index]);
  const kept = same < 0 ? root.shown.length : same;
  while (root.childNodes.length > kept) root.lastChild.remove();
  for (const block of all.slice(kept)) {
    const part = document.createDocumentFragment();
    build(block, part);
    /* One node for each block. */
    root.append(part.childNodes.length === 1 ? part : element("div", {}, part));
  }
}
