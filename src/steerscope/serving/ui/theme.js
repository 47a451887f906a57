// Runs before the first paint, so that a chosen theme does not flash. "auto" follows the system.
(() => {
  try {
    const chosen = localStorage.getItem("steerscope.theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch {
    // A browser without storage follows the system.
  }
})();
