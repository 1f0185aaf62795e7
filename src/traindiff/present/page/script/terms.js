// Explanations of words, for the mouse, the keyboard and screen readers: `data-term` names an entry of the glossary.

const termTip = document.getElementById("term-tip");

function term(name, text = name) {
  return page.terms[name] ? element("span", { class: "term", tabindex: "0", "data-term": name, "aria-describedby": "term-tip" }, text) : text;
}

function showTerm(event) {
  const word = event.target.closest?.("[data-term]");
  if (!word) return;
  termTip.textContent = page.terms[word.dataset.term];
  termTip.hidden = !termTip.textContent;
  const box = word.getBoundingClientRect(), width = Math.min(380, document.documentElement.clientWidth - 16);
  termTip.style.maxWidth = `${width}px`;
  termTip.style.left = `${Math.max(8, Math.min(box.left, document.documentElement.clientWidth - termTip.offsetWidth - 8))}px`;
  const below = box.bottom + 6, fits = below + termTip.offsetHeight < window.innerHeight;
  termTip.style.top = `${fits ? below : Math.max(4, box.top - termTip.offsetHeight - 6)}px`;
}

function hideTerm() {
  termTip.hidden = true;
}

for (const event of ["pointerover", "focusin"]) document.addEventListener(event, showTerm, { signal: life.signal });
for (const event of ["pointerout", "focusout"]) document.addEventListener(event, (one) => { if (one.target.closest?.("[data-term]")) hideTerm(); }, { signal: life.signal });
document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTerm(); }, { signal: life.signal });
document.addEventListener("scroll", hideTerm, { passive: true, signal: life.signal });
