// The bar of each page, with one search over the guide, the Ruby API and the C API. What is searched is in search.js, loaded when it is needed.
(() => {
  const root = document.currentScript.src.replace(/site\.js.*$/, "");
  const SHOWN = 40;

  const bar = document.createElement("nav");
  bar.id = "site-bar";
  bar.innerHTML =
    `<a class="site-name" href="${root}index.html">torch-ddp</a>` +
    `<a href="${root}docs/getting-started.html">Guide</a><a href="${root}ruby/index.html">Ruby API</a><a href="${root}c/files.html">C API</a>` +
    '<input id="site-search" type="search" placeholder="Search (press /)" aria-label="Search" autocomplete="off">' +
    '<ul id="site-results"></ul>';
  document.body.prepend(bar);
  const input = bar.querySelector("#site-search");
  const list = bar.querySelector("#site-results");

  let loading;
  const load = () => (loading ||= new Promise((done) => {
    const script = document.createElement("script");
    script.src = root + "search.js";
    script.onload = () => done(window.searchEntries.map(([title, kind, url, text]) =>
      ({ title, kind, url, text, name: title.toLowerCase(), last: title.toLowerCase().split(/::|[.#]/).pop(), body: text.toLowerCase() })));
    document.head.append(script);
  }));

  // An entry has all words; the closer its name is to them, the earlier it comes.
  const score = (entry, words) => {
    let sum = 0;
    for (const word of words) {
      if (entry.last === word || entry.name === word) sum += 100;
      else if (entry.last.startsWith(word)) sum += 60;
      else if (entry.name.includes(word)) sum += 40;
      else if (entry.body.includes(word)) sum += 5;
      else return 0;
    }
    return sum - Math.min(entry.title.length, 80) / 100;
  };

  const find = (entries, query) => {
    const words = query.toLowerCase().split(/\s+/).filter((word) => word);
    if (words.length === 0) return [];
    return entries.map((entry) => [score(entry, words), entry]).filter(([points]) => points > 0)
      .sort((a, b) => b[0] - a[0]).slice(0, SHOWN).map(([, entry]) => entry);
  };

  const show = (found) => {
    list.replaceChildren(...found.map((entry) => {
      const link = document.createElement("a");
      link.href = root + entry.url;
      const kind = Object.assign(document.createElement("span"), { className: "kind", textContent: entry.kind });
      const text = Object.assign(document.createElement("small"), { textContent: entry.text.slice(0, 110) });
      link.append(kind, entry.title, text);
      link.onclick = () => list.replaceChildren();
      const item = document.createElement("li");
      item.append(link);
      return item;
    }));
  };

  const search = async () => {
    const entries = await load();
    const query = input.value;
    show(find(entries, query));
    document.body.dataset.searched = query;
  };

  input.oninput = search;
  input.onkeydown = (event) => {
    const links = [...list.querySelectorAll("a")];
    const at = links.findIndex((link) => link.classList.contains("chosen"));
    if (event.key === "Escape") return list.replaceChildren();
    if (event.key === "Enter") return (links[Math.max(at, 0)] || input).click();
    if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
    event.preventDefault();
    links[at]?.classList.remove("chosen");
    const next = links[Math.min(Math.max(at + (event.key === "ArrowDown" ? 1 : -1), 0), links.length - 1)];
    next?.classList.add("chosen");
    next?.scrollIntoView({ block: "nearest" });
  };
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || /^(INPUT|TEXTAREA)$/.test(document.activeElement.tagName)) return;
    event.preventDefault();
    input.focus();
  });
  document.addEventListener("click", (event) => bar.contains(event.target) || list.replaceChildren());

  // A link to a search: index.html?search=all_reduce
  const asked = new URLSearchParams(location.search).get("search");
  if (asked) {
    input.value = asked;
    search();
  }
})();
