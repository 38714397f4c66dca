import assert from "node:assert";
import { openai } from "@ai-sdk/openai";
import { generateText, tool } from "ai";
import { z } from "zod";

const weather = tool({
  description: "The weather in a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `It is sunny in ${city}.`,
});
const { toolCalls, toolResults } = await generateText({
  model: openai(process.argv[2]), // over Responses
  tools: { weather },
  toolChoice: "required",
  maxOutputTokens: 64,
  prompt: "What is the weather in Paris?",
});
assert.equal(toolCalls[0].toolName, "weather");
assert.match(toolResults[0].output, /^It is sunny in /);
