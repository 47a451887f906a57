// A text box with a list below it: typing narrows the list, arrows and Enter choose.
import { fill, h, icon } from "./dom.js";

const MOST = 300;
let ids = 0;

export class Combo {
  /** `items()` → [{value, label, hint?, depth?, find?} | {group}], called each time the list opens. */
  constructor(root, { label, items, pick, placeholder = "" }) {
    this.items = items;
    this.pick = pick;
    this.current = "";
    this.at = -1;
    const id = `list${(ids += 1)}`;
    this.input = h("input", {
      type: "text",
      role: "combobox",
      "aria-label": label,
      "aria-expanded": "false",
      "aria-controls": id,
      "aria-autocomplete": "list",
      autocomplete: "off",
      spellcheck: false,
      placeholder,
    });
    this.list = h("ul", { id, role: "listbox", hidden: true });
    root.append(this.input, icon("chevron"), this.list);
    this.input.addEventListener("click", () => {
      if (!this.list.hidden) return;
      this.input.select(); // also when it had the focus already: typing replaces what was chosen
      this.open();
    });
    this.input.addEventListener("input", () => this.open(this.input.value));
    this.input.addEventListener("blur", () => this.close());
    this.input.addEventListener("keydown", (event) => this.key(event));
    this.list.addEventListener("pointerdown", (event) => event.preventDefault());
    this.list.addEventListener("click", (event) => {
      const row = event.target.closest("[role=option]");
      if (row) this.choose(row);
    });
  }

  show(text) {
    this.current = text;
    if (this.list.hidden) this.input.value = text;
  }

  open(narrow = "") {
    const words = narrow.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = (item) =>
      words.every((word) => `${item.label} ${item.find ?? ""} ${item.hint ?? ""}`.toLowerCase().includes(word));
    const found = this.items().filter((item) => (item.group ? !words.length : fits(item)));
    const rows = found.slice(0, MOST).map((item, i) => this.row(item, i, words.length > 0));
    if (!rows.length) rows.push(h("li.none", "Nothing has this name"));
    if (found.length > MOST) rows.push(h("li.none", `${found.length - MOST} more: type to narrow the list`));
    fill(this.list, rows);
    this.list.hidden = false;
    this.input.setAttribute("aria-expanded", "true");
    const here = this.options().findIndex((row) => row.textContent === this.current);
    this.mark(words.length ? 0 : Math.max(here, 0));
  }

  /** One line of the list; a narrowed list is not indented. */
  row(item, i, narrowed) {
    if (item.group) return h("li.group", { role: "presentation" }, item.group);
    const depth = narrowed ? 0 : (item.depth ?? 0);
    const about = { id: `${this.list.id}-${i}`, role: "option", "data-value": item.value, "aria-selected": "false" };
    return h("li", { ...about, "--depth": depth }, item.label, item.hint && h("small", item.hint));
  }

  close() {
    this.list.hidden = true;
    this.input.setAttribute("aria-expanded", "false");
    this.input.removeAttribute("aria-activedescendant");
    this.input.value = this.current;
  }

  options() {
    return [...this.list.querySelectorAll("[role=option]")];
  }

  mark(at) {
    const rows = this.options();
    this.at = Math.max(0, Math.min(rows.length - 1, at));
    rows.forEach((row, i) => row.setAttribute("aria-selected", i === this.at));
    rows[this.at]?.scrollIntoView({ block: "nearest" });
    if (rows[this.at]) this.input.setAttribute("aria-activedescendant", rows[this.at].id);
  }

  choose(row) {
    this.close();
    this.pick(row.dataset.value);
  }

  key(event) {
    const closed = this.list.hidden;
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      if (closed) this.open();
      else this.mark(this.at + (event.key === "ArrowDown" ? 1 : -1));
    } else if (event.key === "Enter" && !closed) {
      event.preventDefault();
      const row = this.options()[this.at];
      if (row) this.choose(row);
    } else if (event.key === "Escape" && !closed) {
      event.stopPropagation();
      this.close();
    }
  }
}
