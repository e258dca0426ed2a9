document.querySelectorAll("table.sortable").forEach(table => {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  const number = text => parseFloat(text.replace(/\u2212/g, "-").replace(/[,%\s]/g, ""));
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") !== "ascending";
    const numeric = head.classList.contains("n");
    const key = row => row.cells[column].textContent;
    const rows = [...body.rows].sort((a, b) => {
      if (!numeric) return key(a).localeCompare(key(b), "en", {numeric: true});
      const x = number(key(a)), y = number(key(b));
      return (isNaN(x) ? -Infinity : x) - (isNaN(y) ? -Infinity : y) || 0;
    });
    if (!up) rows.reverse();
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    body.append(...rows);
  }));
});
