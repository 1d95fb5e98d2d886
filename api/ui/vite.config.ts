import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig } from "vitest/config";

// Where `npm run dev` finds the API: a `datastates serve` elsewhere, or its default address.
const server = process.env.DATASTATES_SERVER ?? "http://127.0.0.1:8642";

export default defineConfig({
  base: "./", // a server may be behind a path prefix
  plugins: [svelte()],
  build: {
    outDir: "../static",
    emptyOutDir: true,
    target: "es2022",
    cssTarget: ["chrome123", "firefox120", "safari17.5"], // the first with light-dark()
    assetsInlineLimit: 0, // the page's content policy allows no data: addresses
    modulePreload: { polyfill: false },
    license: { fileName: "licenses.md" }, // of the bundled packages, whose licences require that they are named
  },
  server: { proxy: { "/api": server, "/healthz": server } },
  test: { include: ["src/**/*.test.ts"], environment: "node" },
});
