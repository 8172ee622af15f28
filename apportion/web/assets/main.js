// Starts the page: reads its data, and draws the page of its kind.

async function start() {
  const data = JSON.parse(document.getElementById("data").textContent), root = document.getElementById("content");
  document.getElementById("title").textContent = data.title;
  startTheme();
  if (data.page === "compare") await comparePage(root, data);
  else if (data.page === "diff") await diffPage(root, data);
  else await planTabs(root, data.plans)(0);
  root.setAttribute("aria-busy", "false");
  performance.mark("ready");
}

start().catch((error) => {
  document.getElementById("content").replaceChildren(make("p", { role: "alert" }, `This page could not be drawn: ${error.message}`));
  throw error;
});
