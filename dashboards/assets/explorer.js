"use strict";
// Explorers: tokens, lists and keyboard shortcuts navigate; links within a page do not scroll it.
(function () {
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[data-in-place]");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    event.stopImmediatePropagation();
    window.headscopeFollow(link.href);
  }, true);
  document.addEventListener("change", (event) => {
    if (event.target.dataset.navigates && event.target.value) window.headscopeFollow(event.target.value);
  });
  // The query token of a text stays visible: the text scrolls inside its frame, not the page.
  window.headscopeShowQuery = () => document.querySelectorAll(".passage").forEach((passage) => {
    const token = passage.querySelector(".token.marked"), frame = passage.getBoundingClientRect();
    if (!token || passage.scrollHeight <= passage.clientHeight) return;
    const { top, bottom } = token.getBoundingClientRect();
    if (top < frame.top || bottom > frame.bottom) passage.scrollTop += top - frame.top - passage.clientHeight / 2;
  });
  // Passages arrive with the page or later; a new one, or one whose query changed, is scrolled once.
  new MutationObserver((changes) => {
    const isPassage = ({ target, addedNodes }) => [target, ...addedNodes].some((node) => node.closest?.(".passage") || node.querySelector?.(".passage"));
    if (changes.some(isPassage)) requestAnimationFrame(window.headscopeShowQuery);
  }).observe(document.documentElement, { childList: true, subtree: true, attributes: true, attributeFilter: ["aria-current"] });
  const OWN_KEYS = "input, select, textarea, [role=grid], [role=slider], [data-head-matrix], .scroll:not(.passage), aside";
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.shiftKey || event.target.closest(OWN_KEYS)) return;
    const link = document.querySelector(`a[data-shortcut="${event.key}"]`);
    if (link) { event.preventDefault(); link.click(); }
  });
})();
