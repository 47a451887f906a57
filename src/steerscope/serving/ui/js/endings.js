// What stands below an answer: how fast it came and how it ended, or why it did not.
import { h } from "./dom.js";
import { send } from "./runs.js";

const ENDS = {
  stop: "ended by itself",
  stop_string: "stop string",
  length: "cut at the limit",
  rule: "ended by a rule",
};
export function facts(run) {
  const n = run.tokens.length;
  if (!n) return "";
  const seconds = (run.last - run.first) / 1000;
  const speed = n > 1 && seconds > 0 ? ` · ${((n - 1) / seconds).toFixed(1)}/s` : "";
  const end =
    run.status === "stopped"
      ? " · stopped"
      : run.status === "done"
        ? ` · ${ENDS[run.finish] ?? run.finish ?? "done"}`
        : "";
  return `${n} ${n === 1 ? "token" : "tokens"}${speed}${end}`;
}

export function problem(run, turn) {
  const { message, problems, status, retryAfter } = run.error;
  const list = problems.map((one) =>
    h("li", {}, h("code", {}, one.param ?? ""), ` ${one.message}`, one.remedy ? `: ${one.remedy}` : ""),
  );
  const title =
    status === 429
      ? `The server is full${retryAfter ? `; try again in ${retryAfter} s` : ""}.`
      : list.length
        ? "The server refused this:"
        : message;
  const again = h(
    "button.plain",
    { type: "button", onclick: () => send(turn.user, { turn, compare: turn.runs.length > 1 }) },
    "Try again",
  );
  return h(
    "div.problem",
    { role: "alert" },
    h("b", {}, title),
    list.length ? h("ul", {}, list) : null,
    h("div", {}, again),
  );
}
