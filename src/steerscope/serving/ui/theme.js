// Runs before the first paint, so that a chosen theme does not flash; "auto" follows the system.
try {
  document.documentElement.dataset.theme = JSON.parse(localStorage.getItem("steerscope.settings"))?.theme ?? "auto";
} catch {
  // A browser without storage follows the system.
}
