/** Markdown from anybody as harmless HTML: no raw HTML, no images, no links except to the web and mail. */
import DOMPurify from "dompurify";
import { Marked } from "marked";

const TAGS = ["p", "br", "hr", "em", "strong", "del", "code", "pre", "ul", "ol", "li", "blockquote", "h4", "h5", "h6", "a", "table", "thead", "tbody", "tr", "th", "td"];
const ADDRESS = /^(?:https?:\/\/|mailto:)/i;

const escaped = (text: string) => text.replace(/[&<>"']/g, (letter) => `&#${letter.charCodeAt(0)};`);

const marked = new Marked({
  gfm: true,
  breaks: true,
  async: false,
  renderer: {
    html: ({ text }) => escaped(text),
    image: ({ text, href }) => escaped(`[image: ${text || href}]`),
    heading({ tokens, depth }) {
      const tag = `h${Math.min(6, depth + 3)}`;
      return `<${tag}>${this.parser.parseInline(tokens)}</${tag}>`;
    },
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

const purify = DOMPurify(window);
purify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName !== "A") return;
  if (!ADDRESS.test(node.getAttribute("href") ?? "")) node.removeAttribute("href");
  node.setAttribute("rel", "noopener noreferrer nofollow");
  node.setAttribute("target", "_blank");
});

export function render(text: string): string {
  return purify.sanitize(marked.parse(text) as string, {
    ALLOWED_TAGS: TAGS, ALLOWED_ATTR: ["href", "rel", "target", "start"], ALLOWED_URI_REGEXP: ADDRESS, ALLOW_DATA_ATTR: false, ALLOW_ARIA_ATTR: false,
  });
}
