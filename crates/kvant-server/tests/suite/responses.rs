//! `/v1/responses`.

use super::*;

const PATH: &str = "/v1/responses";

fn hello() -> Value {
    json!({"model": NAME, "instructions": "Be brief.", "input": "Vec", "max_output_tokens": 12, "temperature": 0})
}

#[tokio::test(flavor = "multi_thread")]
async fn one_answer_and_its_stream() {
    for more in [json!({}), json!({"reasoning": {"effort": "low"}})] {
        let body = and(hello(), more);
        let whole = post(chat_router(), PATH, body.clone()).await.ok();
        assert_eq!((&whole["object"], &whole["status"]), (&json!("response"), &json!("incomplete")));
        assert_eq!(whole["incomplete_details"]["reason"], "max_output_tokens");
        assert_eq!(whole["usage"]["output_tokens"], 12);
        let events = post(chat_router(), PATH, and(body, json!({"stream": true}))).await.events();
        let events: Vec<Value> = events.iter().map(|event| serde_json::from_str(event).unwrap()).collect();
        for (index, event) in events.iter().enumerate() {
            assert_eq!(event["sequence_number"], index);
        }
        let [item] = whole["output"].as_array().unwrap().as_slice() else { panic!("{whole}") };
        let deltas: String = events.iter().filter_map(|event| event["delta"].as_str()).collect();
        assert_eq!(item["content"][0]["text"], deltas);
        let names = ["response.created", "response.in_progress", "response.output_item.added"];
        assert_eq!([0, 1, 2].map(|index| events[index]["type"].as_str().unwrap()), names);
        let last = events.last().unwrap();
        assert_eq!((&last["type"], &last["response"]["usage"]), (&json!("response.incomplete"), &whole["usage"]));
        assert_eq!(last["response"]["output"][0]["content"], item["content"]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn items_become_messages() {
    let items = json!([
        {"role": "user", "content": [{"type": "input_text", "text": "A"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "T"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{\"x\": 3}"},
        {"type": "function_call_output", "call_id": "1", "output": "R"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "B"}]},
    ]);
    let answer = post(chat_router(), PATH, json!({"input": items, "max_output_tokens": 1})).await.ok();
    let text = "# user\n\nA\n\n# assistant\n\nf=3\n\n# tool\n\nR\n\n# assistant\n\nB\n\n# assistant\n\n";
    let same = post(router(), "/tokenize", json!({"prompt": text})).await.ok();
    assert_eq!(answer["usage"]["input_tokens"], same["count"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_field_that_is_wrong_or_unknown_is_named() {
    for (more, field) in [
        (json!({"previous_response_id": "resp_1"}), "previous_response_id"),
        (json!({"conversation": "c"}), "conversation"),
        (json!({"background": true}), "background"),
        (json!({"truncation": "auto"}), "truncation"),
        (json!({"text": {"format": {"type": "json_schema"}}}), "text.format.schema"),
        (json!({"reasoning": {"summary": "long"}}), "reasoning.summary"),
        (json!({"tools": [{"type": "web_search"}], "tool_choice": "required"}), "tools[0].type"),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (json!({"input": []}), "input"),
        (json!({"input": [{"type": "item_reference", "id": "x"}]}), "input[0].type"),
        (json!({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}), "input[0].content[0]"),
        (json!({"input": [{"type": "function_call", "call_id": "x"}]}), "input[0].name"),
    ] {
        let answer = post(chat_router(), PATH, and(hello(), more.clone())).await;
        assert_eq!(answer.refused(), field, "{more}");
    }
    let tools = json!({"tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}]});
    assert_eq!(post(chat_router(), PATH, and(hello(), tools)).await.ok()["tools"][0]["name"], "f");
}

/// A request can continue an earlier response, streamed or not, with new instructions, but only under the same key.
#[tokio::test(flavor = "multi_thread")]
async fn earlier_responses_go_on() {
    let router = chat_router();
    let ask = |body: Value| {
        let body = and(body, json!({"max_output_tokens": 4, "temperature": 0}));
        post(router.clone(), PATH, body)
    };
    let first = ask(json!({"input": "Vec", "instructions": "A"})).await.ok();
    assert_eq!((&first["store"], &first["previous_response_id"]), (&json!(true), &Value::Null));
    let said = first["output"][0]["content"][0]["text"].clone();
    let more = json!({"input": "And?", "instructions": "B"});
    let second = ask(and(more.clone(), json!({"previous_response_id": first["id"]}))).await.ok();
    let sent = json!({"instructions": "B", "input": [
        {"role": "user", "content": "Vec"}, {"role": "assistant", "content": said}, {"role": "user", "content": "And?"},
    ]});
    let same = ask(and(sent, json!({"store": false}))).await.ok();
    assert_eq!(second["usage"]["input_tokens"], same["usage"]["input_tokens"]);
    assert_eq!(second["output"][0]["content"][0]["text"], same["output"][0]["content"][0]["text"]);
    assert_eq!(second["previous_response_id"], first["id"]);
    // Streamed responses are kept too.
    let events = ask(json!({"input": "Vec", "stream": true})).await.events();
    let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    ask(json!({"input": "And?", "previous_response_id": last["response"]["id"]})).await.ok();
    // Responses that were not stored, or belong to another key, cannot be continued.
    let gone = ask(json!({"input": "And?", "previous_response_id": same["id"]})).await;
    assert_eq!(gone.json()["error"]["code"], "previous_response_not_found");
    assert_eq!(gone.refused(), "previous_response_id");
    let body = json!({"input": "a", "previous_response_id": first["id"]}).to_string();
    let request = Request::post(PATH).header(header::CONTENT_TYPE, "application/json");
    let request = request.header("authorization", "Bearer other").body(Body::from(body)).unwrap();
    assert_eq!(send(router.clone(), request).await.refused(), "previous_response_id");
}
