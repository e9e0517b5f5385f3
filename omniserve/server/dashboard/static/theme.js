// The colour theme, set before anything is painted. Loaded in the head, as a plain script.
"use strict";

const themes = {
  names: ["auto", "light", "dark"],
  chosen: "auto",
  system: matchMedia("(prefers-color-scheme: dark)"),

  load() {
    try {
      const name = localStorage.getItem("omniserve-theme");
      if (this.names.includes(name)) this.chosen = name;
    } catch {
      // Storage is forbidden in this browser: the theme follows the system.
    }
  },

  apply() {
    const wished = this.system.matches ? "dark" : "light";
    document.documentElement.dataset.theme = this.chosen === "auto" ? wished : this.chosen;
  },

  choose(name) {
    this.chosen = name;
    try {
      localStorage.setItem("omniserve-theme", name);
    } catch {
      // As above: it holds until the page is left.
    }
    this.apply();
  },
};

themes.load();
themes.apply();
globalThis.omniserveThemes = themes;
