// Sends a chat by way of kvroute, and prints its chunks: MODEL TEXT ROUTER...
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log"
	"net/http"
	"os"
	"strconv"
	"time"
	pb "caller/gen/kvroute/v1"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
)

// route picks a worker: at the next router where one stops, later where all workers are full.
func route(ctx context.Context, routers []pb.RouterClient, request *pb.RouteRequest) (pb.RouterClient, *pb.RouteResponse) {
	for i := 0; ; i++ {
		router := routers[i%len(routers)]
		pick, err := router.Route(ctx, request)
		if err == nil {
			return router, pick
		}
		again, wait := status.Code(err) == codes.Unavailable, 100*time.Millisecond
		for _, detail := range status.Convert(err).Details() {
			if info, ok := detail.(*errdetails.RetryInfo); ok {
				again, wait = true, info.RetryDelay.AsDuration()
			}
		}
		if !again {
			log.Fatal(err)
		}
		time.Sleep(wait)
	}
}

// send has a worker answer; in the place of an answer, how long its engine says to wait.
func send(ctx context.Context, pick *pb.RouteResponse, body []byte) (*http.Response, time.Duration) {
	request, _ := http.NewRequestWithContext(ctx, "POST", pick.Address+"/v1/chat/completions", bytes.NewReader(body))
	request.Header.Set("Content-Type", "application/json")
	if pick.DpRank != nil {
		request.Header.Set("X-data-parallel-rank", fmt.Sprint(*pick.DpRank))
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil || answer.StatusCode == http.StatusOK {
		return answer, 0
	}
	seconds, _ := strconv.Atoi(answer.Header.Get("Retry-After"))
	return nil, time.Duration(seconds) * time.Second
}

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var routers []pb.RouterClient
	for _, address := range os.Args[3:] {
		conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			log.Fatal(err)
		}
		routers = append(routers, pb.NewRouterClient(conn))
	}
	message := map[string]string{"role": "user", "content": os.Args[2]}
	body, _ := json.Marshal(map[string]any{"model": os.Args[1], "messages": []any{message}, "stream": true})
	request := &pb.RouteRequest{Model: os.Args[1], Prompt: &pb.RouteRequest_ChatCompletionBody{ChatCompletionBody: body}}
	for { // each attempt on another worker, until the deadline
		request.RequestId = fmt.Sprint(time.Now().UnixNano()) // the same at every router: it is reserved once
		router, pick := route(ctx, routers, request)
		report := func(step *pb.Progress) {
			step.ReservationId = pick.ReservationId
			router.Report(ctx, &pb.ReportRequest{Progress: []*pb.Progress{step}})
		}
		answer, wait := send(ctx, pick, body)
		if answer == nil {
			report(&pb.Progress{State: pb.ProgressState_PROGRESS_STATE_FAILED, FailureReason: pb.FailureReason_FAILURE_REASON_WORKER})
			request.ExcludedWorkerIds = append(request.ExcludedWorkerIds, pick.WorkerId)
			time.Sleep(wait)
			continue
		}
		state, tokens := pb.ProgressState_PROGRESS_STATE_PREFILL_DONE, uint32(0)
		for lines := bufio.NewScanner(answer.Body); lines.Scan(); {
			if bytes.HasPrefix(lines.Bytes(), []byte("data: {")) {
				fmt.Println(lines.Text())
				if tokens++; tokens%256 == 1 { // at the first one, then often enough to renew the lease
					report(&pb.Progress{State: state, OutputTokens: tokens})
					state = pb.ProgressState_PROGRESS_STATE_RUNNING
				}
			}
		}
		report(&pb.Progress{State: pb.ProgressState_PROGRESS_STATE_FINISHED, OutputTokens: tokens})
		return
	}
}
