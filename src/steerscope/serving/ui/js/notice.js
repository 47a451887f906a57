// The line below the bar, for what concerns the whole page.
import { $, h, iconButton } from "./dom.js";

export function notice(text, { kind = "bad", action = null, progress = null, stays = false } = {}) {
  const bar = $("#notice");
  bar.dataset.kind = kind;
  const amount = progress === null ? null : h("progress", progress >= 0 ? { max: 1, value: progress } : {});
  const close = stays
    ? null
    : iconButton("close", "Close", () => {
        bar.hidden = true;
      });
  bar.replaceChildren(
    ...[
      h("span", {}, text),
      amount,
      action && h("button.plain", { type: "button", onclick: action.act }, action.name),
      close,
    ].filter(Boolean),
  );
  bar.hidden = false;
}
export const hush = () => {
  $("#notice").hidden = true;
};
