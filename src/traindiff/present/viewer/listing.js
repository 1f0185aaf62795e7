// The list renews itself in place: what is typed, scrolled to and focused stays.
"use strict";

const PARTS = ["count", "legend", "runs"];

function renewLater() {
  const seconds = Number(document.body.dataset.again);
  if (seconds) setTimeout(renew, 1000 * seconds);
}

async function renew() {
  const answer = await fetch(location.href).catch(() => null); // the server may have ended, and may come back
  if (answer?.ok) {
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    const focused = document.activeElement?.closest("#runs a")?.getAttribute("href");
    for (const id of PARTS) {
      const before = document.getElementById(id), now = fresh.getElementById(id);
      if (before && now) before.replaceWith(now);
    }
    document.body.dataset.again = fresh.body.dataset.again;
    if (focused) document.querySelector(`#runs a[href="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  }
  renewLater();
}

renewLater();
