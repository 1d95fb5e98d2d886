import { mount } from "svelte";
import "./app.css";
import App from "./App.svelte";
import { findToken } from "./lib/token.svelte";
import { followAddress } from "./lib/view.svelte";

findToken();
followAddress();
const target = document.getElementById("page");
if (target) mount(App, { target });
