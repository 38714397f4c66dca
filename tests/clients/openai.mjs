import assert from "node:assert";
import OpenAI from "openai";

const model = process.argv[2];
const client = new OpenAI();
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "weather", description: "The weather in a city.", parameters } }];
const messages = [{ role: "user", content: "What is the weather in Paris?" }];
const stream = client.chat.completions.stream({ model, messages, tools, tool_choice: "required", max_tokens: 64 });
const [call] = (await stream.finalChatCompletion()).choices[0].message.tool_calls;
assert.equal(call.function.name, "weather");
assert.equal(typeof JSON.parse(call.function.arguments).city, "string");
const answer = await client.responses.create({ model, input: "Say hi.", max_output_tokens: 16 });
assert.ok(answer.output_text);
