// The line below the bar, for messages about the whole page.
import { $, fill, h, iconButton } from "./dom.js";

/** `action` is {name, act}; `progress` is a part of 1, or -1 while it is unknown. */
export function notice(text, { kind = "bad", action = null, progress = null, stays = false } = {}) {
  const bar = $("#notice");
  bar.dataset.kind = kind;
  fill(
    bar,
    h("span", text),
    progress !== null && h("progress", progress >= 0 ? { max: 1, value: progress } : {}),
    action && h("button.plain", { onclick: action.act }, action.name),
    !stays && iconButton("close", "Close", hush),
  );
  bar.hidden = false;
}

export function hush() {
  $("#notice").hidden = true;
}
