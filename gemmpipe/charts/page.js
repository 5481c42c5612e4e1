"use strict";
(() => {
  const root = document.documentElement;
  const all = (selector) => [...document.querySelectorAll(selector)];
  const stored = {
    get(name) { try { return sessionStorage.getItem(name); } catch { return null; } },
    set(name, value) { try { sessionStorage.setItem(name, value); } catch { /* a page without storage */ } },
  };

  // Theme: as the system, light or dark.
  const themes = ["auto", "light", "dark"];
  const button = document.getElementById("theme");
  const show = (theme) => {
    if (theme === "auto") root.removeAttribute("data-theme"); else root.setAttribute("data-theme", theme);
    button.textContent = `theme: ${theme}`;
  };
  let theme = themes.includes(stored.get("theme")) ? stored.get("theme") : "auto";
  button.hidden = false;
  button.addEventListener("click", () => {
    theme = themes[(themes.indexOf(theme) + 1) % themes.length];
    stored.set("theme", theme);
    show(theme);
  });
  show(theme);

  // The text of what is pointed at.
  const tip = document.getElementById("tip");
  const point = (event) => {
    const mark = event.target.closest ? event.target.closest("[data-tip]") : null;
    tip.hidden = !mark;
    if (!mark) return;
    tip.textContent = mark.dataset.tip;
    const box = tip.getBoundingClientRect();
    const left = Math.min(event.clientX + 14, innerWidth - box.width - 8);
    const top = event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 12 : event.clientY + 18;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${Math.max(4, top)}px`;
  };
  document.addEventListener("pointermove", point);
  document.addEventListener("pointerdown", point);
  document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });

  // The data of a figure, as a file.
  const dataOf = (id) => JSON.parse(document.getElementById(id).textContent);
  for (const link of all("a[data-csv]")) {
    link.addEventListener("click", () => {
      if (link.href.startsWith("blob:")) return;
      link.href = URL.createObjectURL(new Blob([dataOf(link.dataset.csv)], { type: "text/csv" }));
    });
  }

  // One product at a time.
  const chooser = document.getElementById("product");
  const choose = (id) => {
    const panels = all("[data-product]");
    if (!panels.some((panel) => panel.id === id)) return false;
    for (const panel of panels) panel.hidden = panel.id !== id;
    chooser.value = id;
    stored.set("product", id);
    return true;
  };
  if (chooser) {
    chooser.addEventListener("change", () => choose(chooser.value));
    const follow = () => { if (choose(location.hash.slice(1))) document.getElementById("candidates").scrollIntoView(); };
    addEventListener("hashchange", follow);
    for (const link of all('a[href^="#product-"]')) {
      link.addEventListener("click", (event) => {
        if (choose(link.hash.slice(1))) {
          event.preventDefault();
          document.getElementById("candidates").scrollIntoView();
        }
      });
    }
    if (!choose(location.hash.slice(1))) choose(stored.get("product"));
  }

  // A mix of small and large M.
  const slider = document.getElementById("mix");
  if (slider) {
    const data = dataOf("mix-data");
    const set = (id, text) => { document.getElementById(id).textContent = text; };
    const time = (us) => us < 999.5 ? `${us.toPrecision(3)} us` : us < 999.5e3 ? `${(us / 1e3).toPrecision(3)} ms` : `${(us / 1e6).toPrecision(3)} s`;
    const update = () => {
      const share = Number(slider.value) / 100;
      const mixed = (pair) => share * pair[0] + (1 - share) * pair[1];
      const before = mixed(data.before), after = mixed(data.after);
      const saved = 100 * (1 - after / before);
      set("mix-small", `${slider.value} %`);
      set("mix-large", `${100 - Number(slider.value)} %`);
      set("mix-result", saved >= 0 ? `${saved.toFixed(1)} % less time` : `${(-saved).toFixed(1)} % more time`);
      set("mix-times", `${time(before)} with the best library, ${time(after)} with the choices`);
    };
    slider.addEventListener("input", update);
    update();
  }
})();
