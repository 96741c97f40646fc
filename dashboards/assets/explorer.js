"use strict";
// Explorers: a token, an item of a list or a key leads on, and the page stays where it is.
(function () {
  const go = (href) => {
    const to = new URL(href, location.href);
    window.dash_clientside.set_props("url", { pathname: to.pathname, search: to.search });
  };
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[data-stays]");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    event.stopImmediatePropagation();
    go(link.href);
  }, true);
  document.addEventListener("change", (event) => {
    if (event.target.dataset.goes && event.target.value) go(event.target.value);
  });
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
    if (event.target.closest("input, select, textarea, [role=grid], [role=slider], .scroll:not(.passage), aside")) return;
    const link = document.querySelector(`a[data-key="${event.key}"]`);
    if (link) { event.preventDefault(); go(link.href); }
  });
})();
