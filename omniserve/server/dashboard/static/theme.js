// The colour theme, set before anything is painted. Loaded in the head, as a plain script.
"use strict";

const themes = {
  names: ["auto", "light", "dark"],

  get chosen() {
    let name = null;
    try {
      name = localStorage.getItem("omniserve-theme");
    } catch {
      // Storage is forbidden in this browser: the theme follows the system.
    }
    return this.names.includes(name) ? name : "auto";
  },

  apply(name) {
    if (name === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
  },

  choose(name) {
    try {
      localStorage.setItem("omniserve-theme", name);
    } catch {
      // As above: it holds until the page is left.
    }
    this.apply(name);
  },
};

themes.apply(themes.chosen);
globalThis.omniserveThemes = themes;
