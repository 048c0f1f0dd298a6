// Clients in JavaScript with their default settings: texts, streams, and tools in two steps, a call and the answer after it.
//
//   node defaults.mjs URL MODEL
//
// The model writes nonsense, and its template begins calls without a mark. It prints a line for each client, and ends with 1 if one fails.

import assert from "node:assert";
import { readFileSync } from "node:fs";
import Anthropic from "@anthropic-ai/sdk";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, isStepCount, Output, streamText, tool } from "ai";
import { createOllama } from "ollama-ai-provider-v2";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, model] = process.argv.slice(2);
const apiKey = "secret";
const messages = [{ role: "user", content: "Vec" }];
// The nonsense of the model comes to an end.
const City = z.object({ city: z.enum(["Bern", "Rome"]) });
const description = "The weather of a city.";
const weather = ({ city }) => `${city}: sunny`;

async function withOpenai() {
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0 });
  const chat = { model, messages, max_tokens: 400 };
  const stream = await client.chat.completions.create({ ...chat, stream: true, stream_options: { include_usage: true } });
  let last;
  for await (const chunk of stream) last = chunk;
  assert(last.usage.completion_tokens > 0);
  assert((await client.chat.completions.create({ ...chat, store: true, verbosity: "low" })).choices[0].message.content);

  // A strict function: a call, its result, and the call after it.
  const called = [];
  const strict = zodFunction({ name: "weather", description, parameters: City, function: (input) => called.push(input) && weather(input) });
  assert(strict.function.strict);
  for (const streams of [{}, { stream: true }]) {
    const options = { ...chat, tools: [strict], tool_choice: "required", ...streams };
    const runner = client.chat.completions.runTools(options, { maxChatCompletions: 2 });
    await runner.done();
    assert(runner.messages.filter(({ role }) => role === "tool").every(({ content }) => /^(Bern|Rome): sunny$/.test(content)));
  }
  assert(called.length >= 4, `${called.length} calls`);
  // The model need not call it, and its text can be cut.
  const free = client.chat.completions.runTools({ ...chat, max_tokens: 8, tools: [strict] }, { maxChatCompletions: 1 });
  await free.done().catch((error) => assert.match(error.message, /length limit was reached/));
  const parsed = await client.chat.completions.parse({ ...chat, response_format: zodResponseFormat(City, "city") });
  assert(City.parse(parsed.choices[0].message.parsed));

  const response = await client.responses.create({ model, input: "Vec", max_output_tokens: 20 });
  await client.responses.create({ model, input: "And?", max_output_tokens: 4, previous_response_id: response.id });
  const events = await client.responses.create({ model, input: "Vec", max_output_tokens: 4, stream: true });
  for await (const event of events) last = event;
  assert(last.type === "response.incomplete" || last.type === "response.completed", last.type);
}

async function withAnthropic() {
  const client = new Anthropic({ baseURL: url, apiKey, maxRetries: 0 });
  const options = { model, messages, max_tokens: 400 };
  const message = await client.messages.stream({ ...options, system: "Be brief." }).finalMessage();
  assert(message.usage.output_tokens > 0);
  const called = [];
  const own = betaZodTool({ name: "weather", description, inputSchema: City, run: (input) => called.push(input) && weather(input) });
  for (const stream of [false, true]) {
    const runner = client.beta.messages.toolRunner({ ...options, tools: [own], tool_choice: { type: "any" }, max_iterations: 2, stream });
    for await (const step of runner) if (stream) for await (const _ of step);
  }
  assert(called.length >= 2, `${called.length} calls`);
  const parsed = await client.messages.parse({ ...options, output_config: { format: zodOutputFormat(City) } });
  assert(City.parse(parsed.parsed_output));
}

// A provider of the package ai.
async function withAi(languageModel) {
  const tools = { weather: tool({ description, inputSchema: City, execute: weather }) };
  const first = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "auto" });
  const steps = { model: languageModel, prompt: "Vec", maxOutputTokens: 400, maxRetries: 0, tools, stopWhen: isStepCount(2), prepareStep: first };
  const check = (steps) => {
    assert.equal(steps.length, 2);
    assert.match(String(steps[0].toolResults[0].output), /: sunny$/);
    assert(steps[1].text.length > 0 || steps[1].toolCalls.length > 0);
  };
  check((await generateText(steps)).steps);
  const failures = [];
  const stream = streamText({ ...steps, onError: ({ error }) => failures.push(error) });
  for await (const _ of stream.textStream);
  if (failures.length > 0) throw failures[0];
  check(await stream.steps);
  const { output } = await generateText({ model: languageModel, prompt: "Vec", maxRetries: 0, output: Output.object({ schema: City }) });
  assert(City.parse(output));
}

// Ollama's API has no choice of tools: the call is one that a conversation has had.
async function withOllama(languageModel) {
  const tools = { weather: tool({ description, inputSchema: City, execute: weather }) };
  const toolCallId = "call_1";
  const history = [
    ...messages,
    { role: "assistant", content: [{ type: "tool-call", toolCallId, toolName: "weather", input: { city: "Bern" } }] },
    { role: "tool", content: [{ type: "tool-result", toolCallId, toolName: "weather", output: { type: "text", value: "sunny" } }] },
  ];
  const options = { model: languageModel, messages: history, tools, maxOutputTokens: 20, maxRetries: 0 };
  assert((await generateText(options)).usage.outputTokens > 0);
  const stream = streamText(options);
  for await (const _ of stream.textStream);
  assert((await stream.usage).outputTokens > 0);
  const { output } = await generateText({ model: languageModel, prompt: "Vec", maxRetries: 0, output: Output.object({ schema: City }) });
  assert(City.parse(output));
}

const v1 = `${url}/v1`;
const openai = createOpenAI({ baseURL: v1, apiKey });
const clients = [
  ["openai", withOpenai],
  ["@anthropic-ai/sdk", withAnthropic],
  ["ai", () => withAi(createOpenAICompatible({ name: "kvant", baseURL: v1, apiKey, supportsStructuredOutputs: true })(model)), "@ai-sdk/openai-compatible"],
  ["ai", () => withAi(openai.chat(model)), "@ai-sdk/openai", "chat"],
  ["ai", () => withAi(openai(model)), "@ai-sdk/openai", "responses"],
  ["ai", () => withAi(createAnthropic({ baseURL: v1, apiKey })(model)), "@ai-sdk/anthropic"],
  ["ai", () => withOllama(createOllama({ baseURL: `${url}/api`, headers: { authorization: `Bearer ${apiKey}` } })(model)), "ollama-ai-provider-v2"],
];
const named = (name) => `${name} ${JSON.parse(readFileSync(new URL(`node_modules/${name}/package.json`, import.meta.url))).version}`;
for (const [name, run, provider, form] of clients) {
  const label = [named(name), provider ? ` with ${named(provider)}` : "", form ? ` (${form})` : ""].join("");
  try {
    await run();
    console.log(label);
  } catch (error) {
    const sent = error.requestBodyValues ? `\nsent: ${JSON.stringify(error.requestBodyValues)}` : "";
    console.error(`${label} fails: ${error.stack}\n${error.responseBody ?? ""}${sent}`);
    process.exitCode = 1;
  }
}
